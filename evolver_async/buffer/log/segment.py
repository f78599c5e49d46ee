"""Byte format of one journal segment: commits, records, checksums; torn and damaged commits.

    commit    [payload bytes u32][crc32 of these four bytes u32] payload [crc32 u32][0xA5]
    payload   records, one after another
    record    [head bytes u32][body bytes u32][crc32 of the body u32] head body

The last checksum of a commit is of everything in its payload but the bodies, which have their own.
A commit without payload seals its segment: writing goes on in the next one.

Torn or damaged. A commit is written from front to end, behind all others; a crash in it leaves it
short or, where the file system had made room beforehand, with zeros at its end. No commit ends in a
zero, so one that ends as it should was written to its end: a wrong checksum in it is
damage, in the very last commit too. Two cases cannot be told apart from the bytes. Damage that cuts
off or zeroes the end of the last commit looks torn. A power cut within the last commit, which was
never acknowledged, looks like damage if its end reached the disk before its middle.
"""

import struct
import zlib
from collections.abc import Iterator

COMMIT = struct.Struct("<II")
RECORD = struct.Struct("<III")
END = struct.Struct("<IB")
# Not 0: after a power cut room that the file system made beforehand is full of zeros.
LAST = 0xA5
NAMES = "[0-9]" * 8 + ".log"  # of the files; others in the directory are a person's
LARGE = 64 << 10  # bytes; copying a smaller body costs less than a call to write it

Body = bytes | memoryview
Place = tuple[int, int, int]  # of a body: offset, bytes, crc32


class SegmentDamage(ValueError):
    """Damage that a crash cannot cause, with the offset of its commit."""

    def __init__(self, offset: int, cause: str) -> None:
        super().__init__(cause)
        self.offset = offset


def record(head: bytes, body: Body, crc: int) -> list[Body]:
    """Encode a record in two parts; the second one is its body, whose checksum is `crc`."""
    return [RECORD.pack(len(head), len(body), crc) + head, body]


def commit(parts: list[Body]) -> list[Body]:
    """Encode a commit of these records' parts, to be written one after the other.

    A large body is not copied.
    """
    crc = zlib.crc32(b"".join(parts[::2]))
    size = struct.pack("<I", sum(map(len, parts)))
    chunks: list[Body] = []
    small: list[Body] = [size, struct.pack("<I", zlib.crc32(size))]
    for part in parts:
        if len(part) < LARGE:
            small.append(part)
        else:
            chunks += (b"".join(small), part)
            small = []
    return [*chunks, b"".join((*small, END.pack(crc, LAST)))]


SEAL = b"".join(commit([]))


def payload_end(data: memoryview, offset: int) -> int | None:
    """Return the end of the payload of the commit at `offset`, None if it is torn.

    Raises SegmentDamage.
    """
    rest = data[offset:]
    if len(rest) < COMMIT.size:
        return None
    length, crc = COMMIT.unpack_from(rest)
    if zlib.crc32(rest[:4]) != crc:
        if not any(rest[COMMIT.size :]):
            return None
        raise SegmentDamage(offset, "damaged, the length of a commit is not to be trusted")
    end = COMMIT.size + length
    if len(rest) < end + END.size:
        return None
    if END.unpack_from(rest, end) == (_checksum(rest[COMMIT.size : end]), LAST):
        return offset + end
    if not any(rest[end + END.size - 1 :]):
        return None
    raise SegmentDamage(offset, f"damaged, a commit of {length} bytes has the wrong checksum")


def _checksum(payload: memoryview) -> int | None:
    """Compute the last checksum of a commit, None if the checksum of a body does not match."""
    crc = start = 0
    while start < len(payload):
        if len(payload) - start < RECORD.size:
            return None
        head_bytes, body_bytes, body_crc = RECORD.unpack_from(payload, start)
        body = start + RECORD.size + head_bytes
        end = body + body_bytes
        if end > len(payload) or zlib.crc32(payload[body:end]) != body_crc:
            return None
        crc = zlib.crc32(payload[start:body], crc)
        start = end
    return crc


def records(data: memoryview, start: int, end: int) -> Iterator[tuple[memoryview, Place]]:
    """Yield the heads in an intact payload, and the places of their bodies."""
    while start < end:
        head_bytes, body_bytes, crc = RECORD.unpack_from(data, start)
        head = start + RECORD.size
        body = head + head_bytes
        yield data[head:body], (body, body_bytes, crc)
        start = body + body_bytes
