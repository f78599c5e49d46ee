"""The invariants that every fault must leave intact, checked from outside.

    I1  every acknowledged trajectory is held, or what became of it is known
    I2  no use of a group is trained twice in one lineage, no trajectory is taken in twice
    I3  the ledger closes
    I4  no thread, process, socket or weight directory is left
    I5  a failure names component, id and cause

I1 to I3 are read off the journal by a second, naive reader, which shares no code with the buffer's
own replay but the decoding of records, and are compared with what the buffer itself restores.
"""

import os
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec
import psutil

from evolver_async.buffer.log.segment import COMMIT, END, RECORD
from evolver_async.buffer.service import BufferService
from evolver_async.buffer.state import records
from evolver_async.buffer.state.groups import UNTRAINED, HeldGroup
from evolver_async.config import Config
from evolver_async.config.load import load
from evolver_async.process.private_directories import PREFIX
from evolver_async.wire import messages

Place = tuple[int, int]  # group and member

# every process started from here inherits it, so that ours are told from those of others
MARK = "EVOLVER_FAULT_SUITE"
os.environ.setdefault(MARK, uuid.uuid4().hex)


class Story:
    """What the records say, followed record by record with nothing but sets and dictionaries.

    `uses` holds, by group, the takes of the present lineage and its ancestors in which it is;
    `whole` is whether the journal begins with the run. AssertionError for what must never happen.
    """

    def __init__(self, first: records.StateSnapshot, reuse: int) -> None:
        at = first.position
        self.reuse = reuse
        self.whole = at.next_group == 0
        self.first_group = at.next_group
        self.lineage = at.lineage
        self.next_take = at.next_take
        self.members: dict[int, set[int]] = {}
        self.kinds: dict[int, str] = {}
        self.owners: dict[int, dict[int, str]] = {}  # to whom each member was granted last
        self.quarantined: dict[str, str] = {}
        self.arrived: dict[int, set[int]] = {}
        self.evicted: dict[int, str] = {}
        self.uses: dict[int, set[int]] = {}
        self.trained: dict[int, set[int]] = {}
        self.takes: dict[int, list[int]] = {}
        self.settled: set[int] = set()  # takes that were reported, or that a RESUME came after
        self.reported: set[int] = set()  # those of them that were reported
        for held in at.groups.values():
            self._grant(held.group_id, held.kind, held.members, "")
            self.arrived[held.group_id] = set(held.arrived)
            self.uses[held.group_id] = set(held.fates)
            fates = held.fates.items()
            self.trained[held.group_id] = {take for take, fate in fates if fate == "trained"}
        for number, take in at.takes.items():
            self._take(number, take.groups)
            if take.reported:
                self.settled.add(number)
                self.reported.add(number)

    def follow(self, record: records.AnyRecord) -> None:
        match record:
            case records.Granted():
                assert record.group_id not in self.members, f"group {record.group_id} granted twice"
                task = record.task.task_id
                assert task not in self.quarantined, f"{task} is granted, but quarantined"
                self._grant(record.group_id, record.kind, record.members, record.actor)
            case records.Reissued():
                self.owners[record.group_id] |= dict.fromkeys(record.members, record.actor)
            case records.Quarantined():
                self.quarantined[record.task_id] = record.reason
            case records.Arrived():
                place = f"group {record.group_id}, member {record.member}"
                assert record.member in self.members.get(record.group_id, ()), f"{place}: unknown"
                assert record.member not in self.arrived[record.group_id], f"{place}: twice"
                self.arrived[record.group_id].add(record.member)
            case records.Evicted():
                for group_id in record.groups:
                    assert group_id not in self.evicted, f"group {group_id}: evicted twice"
                    self.evicted[group_id] = record.reason
            case records.GroupsTaken():
                assert record.take == self.next_take, f"take {record.take}, not {self.next_take}"
                self._take(record.take, record.groups)
                self.next_take += 1
            case records.Reported():
                self._report(record)
            case records.Switched():
                self.quarantined.clear()  # the ids can name other tasks in this stage
            case records.LineageStarted():
                self.quarantined.clear()  # what was wrong may have been mended
                self._resume(record)
            case records.StateSnapshot():
                self._compare(record)

    def closed(self, group_id: int) -> bool:
        """Whether it is known what became of the group."""
        complete = self.arrived[group_id] == self.members[group_id]
        ended = self.kinds[group_id] in UNTRAINED and complete
        settled = self.uses[group_id] & self.settled
        return group_id in self.evicted or ended or len(settled) >= self.reuse

    def complete(self, group_id: int) -> bool:
        """Whether nobody has to work on the group any more."""
        return self.arrived[group_id] == self.members[group_id] or self.closed(group_id)

    def waited_for(self, actor: str) -> dict[int, set[int]]:
        """The members that were granted to `actor` last and are still to come, by group."""
        missing = {
            group_id: {m for m, owner in owners.items() if owner == actor} - self.arrived[group_id]
            for group_id, owners in self.owners.items()
            if not self.closed(group_id)
        }
        return {group_id: members for group_id, members in missing.items() if members}

    def _grant(self, group_id: int, kind: str, members: Iterable[int], actor: str) -> None:
        self.members[group_id] = set(members)
        self.owners[group_id] = dict.fromkeys(members, actor)
        self.kinds[group_id] = kind
        self.arrived[group_id] = set()
        self.uses[group_id] = set()
        self.trained[group_id] = set()

    def _take(self, number: int, groups: list[int]) -> None:
        self.takes[number] = groups
        for group_id in groups:
            if group_id in self.members:
                missing = self.members[group_id] - self.arrived[group_id]
                assert not missing, f"take {number}: group {group_id} lacks members {missing}"
                assert group_id not in self.evicted, f"take {number}: group {group_id} was evicted"
                self.uses[group_id].add(number)
                uses = sorted(self.uses[group_id])
                assert len(uses) <= self.reuse, f"group {group_id} is in takes {uses}"

    def _report(self, record: records.Reported) -> None:
        assert record.take not in self.settled, f"take {record.take} reported twice"
        assert set(record.fates) == set(self.takes[record.take]), f"take {record.take}: {record}"
        self.settled.add(record.take)
        self.reported.add(record.take)
        for group_id, fate in record.fates.items():
            if fate == "trained":
                self.trained[group_id].add(record.take)

    def _resume(self, record: records.LineageStarted) -> None:
        assert record.lineage == self.lineage + 1, f"lineage {record.lineage} after {self.lineage}"
        self.lineage = record.lineage
        undone = {take for take in self.takes if take >= record.take}
        self.takes = {take: groups for take, groups in self.takes.items() if take not in undone}
        self.settled = set(self.takes)
        self.reported -= undone
        for group_id in self.uses:
            if self.uses[group_id] & undone:
                self.evicted.pop(group_id, None)  # it is held again, with that use to come
            self.uses[group_id] -= undone
            self.trained[group_id] -= undone
        self.next_take = record.take
        for group_id, kind in self.kinds.items():
            if kind == "eval" and not self.closed(group_id):
                self.evicted[group_id] = "lineage"

    def _compare(self, snapshot: records.StateSnapshot) -> None:
        at = snapshot.position
        assert (at.lineage, at.next_take) == (self.lineage, self.next_take)
        for held in at.groups.values():
            assert set(held.arrived) == self.arrived[held.group_id], f"group {held.group_id}"
        for group_id in self.members.keys() - at.groups.keys():
            assert self.closed(group_id), f"group {group_id} is gone, nobody knows where"


def told(directory: Path) -> Iterator[records.AnyRecord]:
    """Every record of a journal, those of archived segments first; its buffer may be running."""
    names = {path.name for path in [*directory.glob("*.log"), *directory.glob("archive/*.log")]}
    for name in sorted(names):
        try:
            data = (directory / name).read_bytes()
        except FileNotFoundError:
            data = (directory / "archive" / name).read_bytes()
        start = COMMIT.size
        while start <= len(data):
            length, _ = COMMIT.unpack_from(data, start - COMMIT.size)
            end = start + length
            if end + END.size > len(data):
                break  # being written, or torn
            while start < end:
                head_bytes, body_bytes, _ = RECORD.unpack_from(data, start)
                start += RECORD.size
                yield records.decode(data[start : start + head_bytes])
                start += head_bytes + body_bytes
            start = end + END.size + COMMIT.size


def story_of(directory: Path, reuse: int) -> Story:
    """What the journal in `directory` tells, followed to its end."""
    told_records = told(directory)
    first = next(told_records)
    assert isinstance(first, records.StateSnapshot), f"{directory} begins with {first}"
    story = Story(first, reuse)
    for record in told_records:
        story.follow(record)
    return story


def check_run(run_dir: Path, acked: Collection[Place] = ()) -> Story:
    """I1, I2, I3 of an ended run; `acked`: what its actors were given an ACK for."""
    config = load(run_dir / "config.yaml", [])
    return check_journal(run_dir / "journal", config, run_dir.name, acked)


def check_journal(
    directory: Path, config: Config, run_id: str, acked: Collection[Place] = ()
) -> Story:
    """I1, I2, I3 of a journal that no process has open."""
    welcome = messages.Welcome(run_id=run_id, config={}, weights_address="")
    service = BufferService(config, run_id, directory, welcome, None, 0.0)
    try:
        story = story_of(directory, config.buffer.reuse)
        _check_accounts(service, story)
        _check_acked(story, acked)
    finally:
        service.close()
    return story


def _check_accounts(service: BufferService, story: Story) -> None:
    """The buffer that is started again has all that is not closed, and can read it; I3."""
    state = service.store.state
    state.check()
    groups = state.replay.at.groups
    for group_id, arrived in story.arrived.items():
        held = groups.get(group_id)
        assert held or story.closed(group_id), f"group {group_id} with {arrived} is lost"
        if held is not None:
            assert set(held.arrived) == arrived, f"group {group_id}: {set(held.arrived)}, {arrived}"
            _check_bodies(service, held)
    if story.whole:
        counted = Counter[str]()
        for group_id, arrived in story.arrived.items():
            counted[story.kinds[group_id]] += len(arrived)
        received = {k: amount.trajectories for k, amount in state.ledger.received.items()}
        assert +counted == +Counter(received), f"came in {counted}, the ledger has {received}"


def _check_bodies(service: BufferService, held: HeldGroup) -> None:
    if held.kind in UNTRAINED:
        return  # of evaluation and exploration only the outcome is kept
    read = [(one.group_id, one.member) for one in service.store.trajectories(held)]
    assert read == [(held.group_id, member) for member in sorted(held.arrived)]


def _check_acked(story: Story, acked: Collection[Place]) -> None:
    times = Counter(acked)
    twice = [place for place, count in times.items() if count > 1]
    assert not twice, f"{len(twice)} members had two ACKs: {twice[:5]}"
    lost = [
        (group_id, member)
        for group_id, member in times
        if member not in story.arrived.get(group_id, ())
        and (story.whole or group_id in story.members or group_id >= story.first_group)
    ]
    assert not lost, f"{len(lost)} of {len(times)} acknowledged members are lost: {lost[:5]}"


# ---- leaks


class Traces(msgspec.Struct, frozen=True):
    """What a test may leave behind: names of threads, process ids, private directories."""

    threads: frozenset[str]
    processes: frozenset[int]
    directories: frozenset[str]


def traces() -> Traces:
    """What there is now. Directories are looked for in the temporary directory alone."""
    return Traces(
        frozenset(thread.name for thread in threading.enumerate()),
        frozenset(process.pid for process in psutil.process_iter() if _ours(process)),
        frozenset(str(path) for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")),
    )


def check_leaks(before: Traces) -> None:
    """I4: nothing is there that was not there before."""
    now = traces()
    left = {
        "threads": now.threads - before.threads,
        "processes": now.processes - before.processes,
        "directories": now.directories - before.directories,
    }
    assert not any(left.values()), f"left behind: { {what: sorted(x) for what, x in left.items()} }"


def _ours(process: psutil.Process) -> bool:
    try:
        return (
            process.pid != os.getpid()
            and process.status() != psutil.STATUS_ZOMBIE
            and process.environ().get(MARK) == os.environ[MARK]
        )
    except psutil.Error:
        return False


def check_named(text: str, *needles: str) -> None:
    """I5: the words about a failure name every one of these (component, id, cause)."""
    missing = [needle for needle in needles if needle not in text]
    assert not missing, f"{missing} not named in: {text}"
