"""Read-only access to the journal of a live or finished run, archived segments included.

It takes no lock and changes no file. A live journal grows and drops segments meanwhile: a segment
that disappears is missing from the result, and an unfinished commit at the end is ignored.
"""

import contextlib
import mmap
import zlib
from collections.abc import Iterator
from pathlib import Path

from evolver_async.buffer.log import segment
from evolver_async.buffer.log.journal import Location
from evolver_async.buffer.log.quarantine import JournalError
from evolver_async.buffer.state import records
from evolver_async.schema import Trajectory
from evolver_async.wire.bounded import WireError
from evolver_async.wire.trajectory_bytes import Parcel, unwrap

ARCHIVE = "archive"
MAPPED = 16  # segments at a time, as each keeps a file open


class JournalReader:
    """Reader of the segments that exist now: `numbers`, without a gap, the newest last."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._maps: dict[int, mmap.mmap] = {}
        found = {int(path.stem) for path in directory.glob(segment.NAMES)}
        found |= {int(path.stem) for path in (directory / ARCHIVE).glob(segment.NAMES)}
        first = newest = max(found, default=-1)
        while first - 1 in found:
            first -= 1
        self.numbers = range(first, newest + 1) if found else range(0)

    def read(self) -> Iterator[tuple[records.AnyRecord, Location]]:
        """Yield every record with the place of its body. Raises JournalError for damage."""
        for number in self.numbers:
            yield from self.read_segment(number)

    def replayed(self) -> list[tuple[records.AnyRecord, Location]]:
        """Return what a start replays: the records of the newest segment that has any.

        They begin with a snapshot of the state. Raises JournalError for damage.
        """
        for number in reversed(self.numbers):
            if found := list(self.read_segment(number)):
                return found
        return []

    def newest_stage(self) -> int:
        """Return the largest stage in the records that a start replays, -1 without any.

        Raises JournalError for damage.
        """
        stages = [stage for record, _ in self.replayed() for stage in _stages_in(record)]
        return max(stages, default=-1)

    def trajectory(self, location: Location) -> Trajectory | None:
        """Return the trajectory at `location`, None if the run has not kept its segment.

        Raises JournalError if its bytes are damaged.
        """
        number, offset, size, crc = location
        data = self._mapped(number, offset + size)
        if data is None:
            return None
        body, path = data[offset : offset + size], self._paths(number)[0]
        if len(body) != size or zlib.crc32(body) != crc:
            raise JournalError(f"{path} at {offset}: damaged trajectory")
        try:
            return unwrap(Parcel(body, crc))
        except WireError as error:
            raise JournalError(f"{path} at {offset}: {error}") from error

    def kept(self, location: Location) -> bool:
        """True if the segment of `location` is among those that exist."""
        return bool(location[2]) and location[0] in self.numbers

    def read_segment(self, number: int) -> Iterator[tuple[records.AnyRecord, Location]]:
        """Yield the records of one segment; none if it is gone. Raises JournalError for damage."""
        data = self._segment(number)
        offset = 0
        while data is not None and offset < len(data):
            try:
                end = segment.payload_end(data, offset)
            except segment.SegmentDamage as damage:
                path = self._paths(number)[0]
                raise JournalError(f"{path} at {damage.offset}: {damage}") from None
            if end is None:
                break
            start = offset + segment.COMMIT.size
            for head, place in segment.records(data, start, end):
                yield self._decoded(number, head), (number, *place)
            offset = end + segment.END.size

    def _segment(self, number: int) -> memoryview | None:
        for path in self._paths(number):
            try:
                return memoryview(path.read_bytes())
            except FileNotFoundError:
                continue
        return None

    def _mapped(self, number: int, end: int) -> mmap.mmap | None:
        """Return the map of a segment of at least `end` bytes, None if it is gone."""
        held = self._maps.pop(number, None)
        if held is None or len(held) < end:
            held = self._map(number)
        if held is not None:
            self._maps[number] = held
        if len(self._maps) > MAPPED:
            del self._maps[next(iter(self._maps))]  # the one that was not read for longest
        return held

    def _map(self, number: int) -> mmap.mmap | None:
        for path in self._paths(number):
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return None

    def _paths(self, number: int) -> tuple[Path, ...]:
        """Return the places of a segment, in the order in which it moves."""
        name = f"{number:08d}.log"
        return self.directory / name, self.directory / ARCHIVE / name

    def _decoded(self, number: int, head: memoryview) -> records.AnyRecord:
        try:
            return records.decode(head)
        except (ValueError, RecursionError) as error:
            raise JournalError(f"{self._paths(number)[0]}: {error}") from error


def _stages_in(record: records.AnyRecord) -> list[int]:
    """Return the stages that a record names."""
    match record:
        case records.StateSnapshot():
            at = record.position
            held = [*at.groups.values(), *at.takes.values()]
            return [at.stage, *(one.stage for one in held)]
        case records.Switched() | records.GroupsTaken() | records.LineageStarted():
            return [record.stage]
        case _:
            return []
