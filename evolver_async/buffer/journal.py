"""The write-ahead log: what was committed is there after a kill or a power cut, or a start says so.

A journal is a directory of numbered segments. A segment is a series of commits, each one `[length
u32][crc32 of the payload u32][crc32 of these eight bytes u32]` and a payload of records `[head
bytes u32][body bytes u32][head][body]`; what the bytes mean is the caller's. The first record of a
segment is a snapshot, so that older segments can go. A commit is written with one call and synced
before anybody is answered, so it is on disk as a whole or was never promised: one that is torn at
the end of the newest segment is cut off, damage anywhere else is a JournalError and nothing is
touched.
"""

import errno
import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

COMMIT = struct.Struct("<III")
RECORD = struct.Struct("<II")


class JournalError(RuntimeError):
    """The journal cannot be used; names file and offset."""


class Journal:
    """One process appends. `replay` must be read to its end before the first `append`."""

    def __init__(self, directory: Path, segment_bytes: int, archive: bool) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.archive = archive
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = open(directory / "lock", "w")  # noqa: SIM115 (held until close)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise JournalError(f"{directory}: in use by another process") from error
        self.sizes = {int(path.stem): path.stat().st_size for path in directory.glob("*.log")}
        self.newest = max(self.sizes, default=0)
        self._snapshot_bytes = 0
        self._fd = -1
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self.free = self._free()
        numbers = sorted(self.sizes)
        if numbers and numbers != list(range(numbers[0], numbers[-1] + 1)):
            missing = sorted(set(range(numbers[0], numbers[-1])) - set(numbers))
            raise JournalError(f"{self._path(missing[0])}: missing")

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(self.sizes.values())

    @property
    def full_segment(self) -> bool:
        """Whether so much was written since its snapshot that another one hardly counts."""
        written = self.sizes[self.newest] - self._snapshot_bytes
        return written >= max(self.segment_bytes, 4 * self._snapshot_bytes)

    def replay(self) -> Iterator[tuple[memoryview, tuple[int, int, int]]]:
        """Every record's head, and where its body lies: segment, offset, bytes.

        Cuts off a torn commit at the very end. Raises JournalError for other damage.
        """
        for number in sorted(self.sizes):
            data = memoryview(self._path(number).read_bytes())
            offset = 0
            if not data:
                self._cut(number, 0, 0)
            while offset < len(data):
                payload = self._payload(number, data, offset)
                if payload is None:
                    self._cut(number, offset, len(data))
                    break
                offset += COMMIT.size
                end = offset + len(payload)
                if offset == COMMIT.size:
                    self._snapshot_bytes = end
                while offset < end:
                    head_bytes, body_bytes = RECORD.unpack_from(data, offset)
                    head = offset + RECORD.size
                    body = head + head_bytes
                    yield data[head:body], (number, body, body_bytes)
                    offset = body + body_bytes
        if self.sizes:
            self._open(self.newest)

    def append(self, head: bytes, body: bytes = b"") -> tuple[int, int, int]:
        """Adds a record to the next commit; returns where its body will lie."""
        start = self.sizes[self.newest] + COMMIT.size + self._pending_bytes + RECORD.size
        self._pending += (RECORD.pack(len(head), len(body)), head, body)
        self._pending_bytes += RECORD.size + len(head) + len(body)
        return self.newest, start + len(head), len(body)

    def commit(self) -> None:
        """Writes and syncs what was appended. OSError means that nothing of it was promised."""
        if not self._pending:
            return
        crc = 0
        for part in self._pending:
            crc = zlib.crc32(part, crc)
        sizes = struct.pack("<II", self._pending_bytes, crc)
        self._write([sizes, struct.pack("<I", zlib.crc32(sizes)), *self._pending])
        os.fdatasync(self._fd)
        self.sizes[self.newest] += COMMIT.size + self._pending_bytes
        self._pending, self._pending_bytes = [], 0
        self.free = self._free()

    def roll(self, snapshot: bytes) -> None:
        """Begins a new segment with this record. Everything appended must be committed."""
        assert not self._pending, "roll between commits only"
        if self._fd >= 0:
            os.close(self._fd)
        self.newest += 1
        self.sizes[self.newest] = 0
        self._open(self.newest)
        self.append(snapshot)
        self.commit()
        self._snapshot_bytes = self.sizes[self.newest]
        _sync_directory(self.directory)

    def drop(self, before: int) -> None:
        """Deletes the segments older than `before`, or moves them to archive/."""
        for number in sorted(self.sizes):
            if number >= min(before, self.newest):
                break
            path = self._path(number)
            if self.archive:
                (self.directory / "archive").mkdir(exist_ok=True)
                path.rename(self.directory / "archive" / path.name)
            else:
                path.unlink()
            del self.sizes[number]

    def read(self, location: tuple[int, int, int]) -> bytes:
        """The body at a location of a committed record."""
        number, offset, size = location
        fd = os.open(self._path(number), os.O_RDONLY)
        try:
            data = os.pread(fd, size, offset)
        finally:
            os.close(fd)
        if len(data) != size:
            raise JournalError(f"{self._path(number)} at {offset}: {len(data)} of {size} bytes")
        return data

    def measure(self) -> None:
        """Looks again how much space the disk has."""
        self.free = self._free()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._lock.close()

    def _payload(self, number: int, data: memoryview, offset: int) -> memoryview | None:
        """The commit at `offset`; None when it ends the file and is torn. Else JournalError."""
        where = f"{self._path(number)} at {offset}"
        rest = data[offset:]
        if len(rest) < COMMIT.size or not any(rest):
            return None  # file systems may leave zeros where a commit was being written
        length, crc, header_crc = COMMIT.unpack_from(rest)
        if zlib.crc32(rest[:8]) != header_crc:
            raise JournalError(f"{where}: damaged, the length of a commit is not to be trusted")
        payload = rest[COMMIT.size : COMMIT.size + length]
        if len(payload) == length and zlib.crc32(payload) == crc:
            return payload
        if len(rest) <= COMMIT.size + length:
            return None
        raise JournalError(f"{where}: damaged, a commit of {length} bytes has the wrong checksum")

    def _cut(self, number: int, offset: int, end: int) -> None:
        path = self._path(number)
        if number != self.newest:
            raise JournalError(f"{path} at {offset}: damaged")
        log.warning("%s: cut off an unfinished commit, %d bytes at %d", path, end - offset, offset)
        if offset == 0:
            # its snapshot was never committed, so nothing was promised from this segment
            path.unlink()
            del self.sizes[number]
            self.newest = max(self.sizes, default=0)
            return
        with open(path, "r+b") as file:
            file.truncate(offset)
            os.fsync(file.fileno())
        self.sizes[number] = offset

    def _open(self, number: int) -> None:
        self._fd = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _write(self, parts: list[bytes]) -> None:
        """All of it, or the file is as before."""
        size = self.sizes[self.newest]
        data = memoryview(b"".join(parts))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            os.ftruncate(self._fd, size)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.free = 0
            raise

    def _free(self) -> int:
        disk = os.statvfs(self.directory)
        return disk.f_bavail * disk.f_frsize

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:08d}.log"


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
