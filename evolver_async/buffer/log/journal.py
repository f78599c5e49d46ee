"""Write-ahead log: a commit survives a kill and a power cut, or the next start reports its loss.

A journal is a directory of numbered segments (`segment` has their bytes); what the records mean is
the caller's. A commit is written and synced before any request is answered, so it is on disk as a
whole or was never acknowledged.

What a start reads. The first record of a segment is a snapshot of everything before it, with the
place and checksum of every body that may still be asked for, and the sizes of the segments sealed
until then: the index of them all. So a start reads the newest segment alone and looks at the sizes
of the others. A sealed segment that is missing or short is found at once (its last commit says that
there is a next one); a changed body when it is read, by its checksum.

What is refused. A commit that is torn at the end of the newest segment is cut off. Any other damage
is a JournalError (see `quarantine`). A full disk is DiskFull: the same commit can be tried again. A
sync that fails is neither, as the contents of the disk are unknown then: see SyncError.
"""

import contextlib
import logging
import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from evolver_async.buffer.log import disk, segment
from evolver_async.buffer.log.archive import Archive
from evolver_async.buffer.log.quarantine import JournalError, damaged, lost
from evolver_async.checkpoint.sync import sync_directory
from evolver_async.errors import Inconsistency

SYNCS = 32
SEALED = struct.Struct("<IQ")  # number and bytes of a sealed segment

Location = tuple[int, int, int, int]  # of a body: segment, offset, bytes, crc32

log = logging.getLogger(__name__)


class Journal:
    """Journal of one writer. `replay` must be read to its end before the first `append`."""

    def __init__(self, directory: Path, segment_bytes: int, archive_bytes: float = 0) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.archive = Archive(directory / "archive", archive_bytes)
        if not directory.exists():
            directory.mkdir(parents=True)
            sync_directory(directory.parent)
        self._lock = disk.lock(directory)  # held until close
        self.sizes = {int(path.stem): path.stat().st_size for path in directory.glob(segment.NAMES)}
        self.newest = max(self.sizes, default=0)
        self.problem = ""  # the reason why the last commit was refused
        self.sync_s: deque[float] = deque(maxlen=SYNCS)  # seconds of the newest syncs
        self._sealed: dict[int, int] = {}
        self._snapshot_bytes = self._counted_from = 0
        self._fd = -1
        self._pending: list[segment.Body] = []
        self._pending_bytes = 0
        self._broken = self._waits = False  # _waits: until the disk is measured again
        self.free = disk.free_bytes(self.directory)

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(self.sizes.values())

    @property
    def full_segment(self) -> bool:
        """True if the segment is so long that another snapshot hardly adds to it."""
        written = self.sizes[self.newest] - self._counted_from
        return written >= max(self.segment_bytes, 4 * self._snapshot_bytes)

    def replay(self) -> Iterator[tuple[memoryview, Location]]:
        """Yield the newest segment's snapshot and every record since: head and place of the body.

        Cuts off a torn commit at the very end. Raises JournalError for other damage.
        """
        begun = self._begun()
        number, offset = self.newest, 0
        data = memoryview(self._path(number).read_bytes() if number else b"")
        while offset < len(data):
            end = self._payload_end(number, data, offset)
            start = offset + segment.COMMIT.size
            if end is None:
                self._cut(number, offset, len(data))
                break
            if end == start:
                raise self._lacks_next(number, begun)
            if offset == 0:
                self._snapshot_bytes = self._counted_from = end + segment.END.size
                _, (table, table_bytes, _) = next(segment.records(data, start, end))
                self._sealed = dict(SEALED.iter_unpack(data[table : table + table_bytes]))
            for head, place in segment.records(data, start, end):
                yield head, (number, *place)
            offset = end + segment.END.size
        if begun:
            log.warning("%s: removed, its first commit is unfinished", self._path(begun))
            self._path(begun).unlink()
        if self.sizes:
            self._fd = os.open(self._path(number), os.O_WRONLY | os.O_APPEND)
            # what a killed process wrote may have been read from memory: no DUP before it is synced
            self._sync(self._fd, self.sizes[number])

    def check_sealed(self, first: int) -> None:
        """Raise JournalError unless the segments from `first` on are complete."""
        for number in range(first, self.newest):
            size, sealed = self.sizes.get(number, 0), self._sealed.get(number, 1)
            if not size:
                cause = "empty" if number in self.sizes else "missing"
                raise lost(self.directory, f"{self._path(number)}: {cause}")
            if size < sealed:
                raise damaged(
                    self._path(number), size, f"damaged, {sealed - size} bytes are missing"
                )

    def append(self, head: bytes, body: segment.Body = b"", crc: int | None = None) -> Location:
        """Add a record to the next commit; return the location that its body will have.

        `crc`: the CRC32 of the body, if it is already known.
        """
        crc = zlib.crc32(body) if crc is None else crc
        parts = segment.record(head, body, crc)
        start = self.sizes[self.newest] + segment.COMMIT.size + self._pending_bytes
        self._pending += parts
        self._pending_bytes += sum(map(len, parts))
        return self.newest, start + len(parts[0]), len(body), crc

    def commit(self) -> None:
        """Write and sync the appended records. Raises DiskFull if there is no room."""
        sync = self.write()
        if sync is not None:
            sync()

    def write(self) -> Callable[[], None] | None:
        """Write the appended records; return the call that syncs them, None if there are none.

        The call may run in another thread while records are appended, and must have returned before
        the next write. It raises SyncError. Raises DiskFull if there is no room.
        """
        if self._broken:
            raise disk.SyncError(f"{self._path(self.newest)}: not to be written after a failure")
        if not self._pending:
            return None
        if self._waits:
            raise disk.DiskFull(self.problem)
        chunks = segment.commit(self._pending)
        size = self.sizes[self.newest]
        try:
            self._write(self._fd, chunks, size)
        except disk.DiskFull as refusal:
            if str(refusal) != self.problem:
                log.error("%s; nothing is acknowledged until there is room", refusal)
            self.problem, self.free, self._waits = str(refusal), 0, True
            raise
        self.sizes[self.newest] += sum(map(len, chunks))
        self._pending, self._pending_bytes = [], 0
        self.free = disk.free_bytes(self.directory)
        if self.problem:
            log.warning("%s: there is room again", self.directory)
            self.problem = ""
        return partial(self._sync, self._fd, size)

    def roll(self, snapshot: bytes) -> None:
        """Begin a new segment with this record. Everything appended must be committed.

        Raises DiskFull if there is no room; the old segment goes on then, and is full again when as
        much has been written once more.
        """
        if self._pending:
            raise Inconsistency(f"{self.directory}: a segment begins between commits only")
        self._counted_from = self.sizes.get(self.newest, 0)
        sealed = b"".join(SEALED.pack(*sizes) for sizes in sorted(self.sizes.items()))
        chunks = segment.commit(segment.record(snapshot, sealed, zlib.crc32(sealed)))
        path = self._path(self.newest + 1)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        except OSError as error:
            raise disk.no_room(self.directory, error) from error
        try:
            self._write(fd, chunks, 0)
        except disk.DiskFull:
            os.close(fd)
            path.unlink()
            raise
        self._sync(fd, 0)
        # The name of the new segment must be on disk before the old one is sealed and before any
        # commit in it is acknowledged.
        sync_directory(self.directory)
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # the seal is checked if present, not required
                os.write(self._fd, segment.SEAL)
            os.close(self._fd)
        self._fd = fd
        self.newest += 1
        self.sizes[self.newest] = self._snapshot_bytes = self._counted_from = sum(map(len, chunks))

    def drop(self, before: int) -> None:
        """Delete the segments older than `before`, or move them to the archive."""
        for number in sorted(self.sizes):
            if number >= min(before, self.newest):
                break
            self.archive.remove(self._path(number))
            del self.sizes[number]
        self.archive.trim()

    def read(self, location: Location) -> bytes:
        """Read the body of a committed record. Raises JournalError if it is not as written."""
        number, offset, size, crc = location
        path = self._path(number)
        try:
            with open(path, "rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, offset)
        except FileNotFoundError:
            raise JournalError(f"{path} at {offset}: the file is missing") from None
        if len(data) != size:
            raise damaged(path, offset, f"damaged, {len(data)} of {size} bytes are there")
        if zlib.crc32(data) != crc:
            raise damaged(path, offset, f"damaged, a body of {size} bytes has the wrong checksum")
        return data

    def measure(self) -> None:
        """Measure the free space again; a refused commit may then be tried again."""
        self.free = disk.free_bytes(self.directory)
        self._waits = False

    def end(self) -> str:
        """The newest segment and its size, for people."""
        return f"{self._path(self.newest)} with {self.sizes[self.newest]} bytes"

    def where(self, location: Location) -> str:
        """File and offset, for people."""
        return f"{self._path(location[0])} at {location[1]}"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._lock.close()

    def _begun(self) -> int:
        """Return the newest segment if its snapshot was never committed, and discount it; else 0.

        Raises JournalError if a crash cannot have left it so.
        """
        number = self.newest
        if not number:
            return 0
        data = memoryview(self._path(number).read_bytes())
        if self._payload_end(number, data, 0) is not None:
            return 0
        del self.sizes[number]
        self.newest = max(self.sizes, default=0)
        if self.newest != number - 1:
            raise damaged(self._path(number), 0, "damaged, its first commit is cut short")
        return number

    def _lacks_next(self, number: int, begun: int) -> JournalError:
        if begun:
            return damaged(self._path(begun), 0, "damaged, its first commit is cut short")
        name = self._path(number).name
        text = f"{self._path(number + 1)}: missing, {name} says that it was begun"
        return lost(self.directory, text)

    def _payload_end(self, number: int, data: memoryview, offset: int) -> int | None:
        try:
            return segment.payload_end(data, offset)
        except segment.SegmentDamage as damage:
            raise damaged(self._path(number), damage.offset, str(damage)) from None

    def _cut(self, number: int, offset: int, end: int) -> None:
        path = self._path(number)
        log.warning("%s: cut off an unfinished commit, %d bytes at %d", path, end - offset, offset)
        os.truncate(path, offset)
        self.sizes[number] = offset

    def _write(self, fd: int, chunks: list[segment.Body], size: int) -> None:
        """Append all bytes to a file of `size` bytes, or leave the file as it was."""
        try:
            for left in map(memoryview, chunks):
                while left:
                    left = left[os.write(fd, left) :]
        except OSError as error:
            # A torn commit with others behind it would be damage at the next start. Until it is cut
            # off nothing may follow it.
            self._broken = True
            os.ftruncate(fd, size)
            refusal = disk.no_room(self.directory, error)
            self._broken = False
            raise refusal from error

    def _sync(self, fd: int, size: int) -> None:
        """`size`: the bytes of the file that were synced before."""
        began = time.monotonic()
        try:
            os.fdatasync(fd)
        except OSError as error:
            self._broken = True
            with contextlib.suppress(OSError):
                os.ftruncate(fd, size)  # data in memory alone must not pass for durable
            raise disk.SyncError(f"{self.directory}: could not be synced: {error}") from error
        self.sync_s.append(time.monotonic() - began)

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:08d}.log"
