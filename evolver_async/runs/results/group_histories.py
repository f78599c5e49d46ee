"""Histories of groups: each member, take and fate that the records of a journal tell.

A fold over records that needs neither the tasks nor the configuration of the run, so it can begin
at the snapshot of any segment. `buffer.state` has the rules that made the records.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import singledispatchmethod

from evolver_async.buffer.state import records
from evolver_async.buffer.state.groups import UNTRAINED, ZERO_SPREAD, Location, Take
from evolver_async.buffer.state.replay import UNREPORTED
from evolver_async.lineages import Fork, version_lag
from evolver_async.schema import Kind, Task, WeightId

TRAINED = "trained"


@dataclass
class GroupUse:
    """One take of a group by the learner.

    `fate`: "trained", the reason of a filter, or "" if it is not reported. `abandoned`: a resumed
    learner went back to before this take.
    """

    take: int
    lineage: int
    head: WeightId | None
    fate: str = ""
    abandoned: bool = False

    @property
    def step(self) -> int:
        """Learner step of the take, as in metrics.jsonl."""
        return self.take + 1


@dataclass
class MemberHistory:
    """Arrival of one member. `turns` is None if the arrival itself is in a removed segment;
    `sampled`: its oldest and newest weights in each lineage."""

    attempt: int
    tokens: int
    reward: float
    success: bool
    turns: int | None
    sampled: list[WeightId]
    location: Location


@dataclass
class GroupHistory:
    """History of one group. `ended`: fate and reason of its eviction, None without one."""

    group_id: int
    task: Task
    kind: Kind
    stage: int
    members: list[int]
    arrived: dict[int, MemberHistory] = field(default_factory=dict)
    uses: list[GroupUse] = field(default_factory=list)
    ended: tuple[str, str] | None = None

    @property
    def fate(self) -> tuple[str, str]:
        """Fate and reason: trained, filtered, evicted, or held if the buffer still had it."""
        fates = [use.fate for use in self.uses if use.fate and not use.abandoned]
        if TRAINED in fates:
            return TRAINED, ""
        if fates:
            return "filtered", fates[-1]
        if self.ended is not None:
            return self.ended
        if self.kind in UNTRAINED and len(self.arrived) == len(self.members):
            return "filtered", "evaluated" if self.kind == "eval" else "explored"
        return "held", ""


class RunHistory:
    """Groups of a run by number, its takes and forks, and the starts of its learner.

    `line`: the takes that led to the present weights, by number; those of abandoned lineages are
    not among them.
    """

    def __init__(self) -> None:
        self.groups: dict[int, GroupHistory] = {}
        self.line: dict[int, Take] = {}
        self.forks: dict[int, Fork] = {}
        self.starts: list[records.LineageStarted] = []
        self._takes: dict[int, Take] = {}
        self._stage = 0
        self._lineage = 0
        self._head: WeightId | None = None
        self._begun = False

    def follow(self, read: Iterable[tuple[records.AnyRecord, Location]]) -> None:
        """Add records in their order, each with the place of its trajectory."""
        for record, location in read:
            if isinstance(record, records.Arrived):
                self._arrive(record, location)
            else:
                self._apply(record)

    def lag(self, use: GroupUse, sampled: list[WeightId]) -> int | None:
        """Count the most versions from weights to the take's head; None if it is unknown."""
        if not sampled or use.head is None:
            return None
        try:
            return max(version_lag(use.head, weights, self.forks) for weights in sampled)
        except KeyError:  # the fork is in a removed segment
            return None

    def _arrive(self, record: records.Arrived, location: Location) -> None:
        group = self.groups.get(record.group_id)
        if group is not None:
            names = ("attempt", "tokens", "reward", "success", "turns", "sampled")
            facts = {name: getattr(record, name) for name in names}
            group.arrived[record.member] = MemberHistory(**facts, location=location)

    @singledispatchmethod
    def _apply(self, record: records.Record) -> None:
        """Apply a record; those without a method of their own concern no group's history."""

    @_apply.register
    def _snapshot(self, record: records.StateSnapshot) -> None:
        if self._begun:
            return  # the records before it have told the same
        self._begun = True
        at = record.position
        self.forks, self._takes = dict(at.forks), dict(at.takes)
        self.line = {n: taken for n, taken in at.takes.items() if n < at.next_take}
        self._stage, self._lineage, self._head = at.stage, at.lineage, at.head
        for held in at.groups.values():
            group = GroupHistory(held.group_id, held.task, held.kind, held.stage, held.members)
            self.groups[held.group_id] = group
            for member, one in held.arrived.items():
                facts = (one.attempt, one.tokens, one.reward, one.success, None, one.sampled)
                group.arrived[member] = MemberHistory(*facts, location=one.location)
            for take, fate in held.fates.items():
                taken = at.takes.get(take)
                head, lineage = (taken.head, taken.lineage) if taken else (None, at.lineage)
                group.uses.append(GroupUse(take, lineage, head, fate))
        for take, taken in at.takes.items():
            if not taken.reported and take < at.next_take:
                for group_id in taken.groups:
                    use = GroupUse(take, taken.lineage, taken.head)
                    self.groups[group_id].uses.append(use)

    @_apply.register
    def _grant(self, record: records.Granted) -> None:
        self.groups[record.group_id] = GroupHistory(
            record.group_id, record.task, record.kind, self._stage, record.members
        )

    @_apply.register
    def _evict(self, record: records.Evicted) -> None:
        fate = "filtered" if record.reason == ZERO_SPREAD else "evicted"
        for group_id in record.groups:
            if group := self.groups.get(group_id):
                group.ended = fate, record.reason

    @_apply.register
    def _switch(self, record: records.Switched) -> None:
        self._stage = record.stage

    @_apply.register
    def _take(self, record: records.GroupsTaken) -> None:
        taken = self._takes.get(record.take)
        head = (taken.head if taken is not None else None) or self._head
        version = taken.version if taken is not None else None
        now = Take(self._lineage, record.stage, record.groups, head, version=version)
        self._takes[record.take] = self.line[record.take] = now
        for group_id in record.groups:
            if group := self.groups.get(group_id):
                group.uses.append(GroupUse(record.take, self._lineage, head))

    @_apply.register
    def _report(self, record: records.Reported) -> None:
        taken = self._takes.get(record.take)
        if taken is None:
            return
        self._head = WeightId(lineage=taken.lineage, step=record.version)
        if taken.version not in (None, record.version):
            for number, later in self._takes.items():
                if number > record.take:
                    later.head = later.version = None
        taken.reported, taken.version = True, record.version
        self._end_uses(record.take, record.fates)

    def _end_uses(self, take: int, fates: dict[int, str]) -> None:
        for group_id, fate in fates.items():
            for use in self.groups[group_id].uses if group_id in self.groups else ():
                if use.take == take and not use.fate and not use.abandoned:
                    use.fate = fate

    @_apply.register
    def _drop_repeats(self, record: records.RepeatsDropped) -> None:
        self._takes = {n: taken for n, taken in self._takes.items() if n < record.take}

    @_apply.register
    def _resume(self, record: records.LineageStarted) -> None:
        self.starts.append(record)
        self.line = {n: taken for n, taken in self.line.items() if n < record.take}
        for number, taken in self._takes.items():
            if number < record.take and not taken.reported:
                taken.reported = True
                self._end_uses(number, dict.fromkeys(taken.groups, UNREPORTED))
        undone = {n: taken for n, taken in self._takes.items() if n >= record.take}
        for number, taken in undone.items():
            taken.reported = False
            for group_id in taken.groups:
                for use in self.groups[group_id].uses if group_id in self.groups else ():
                    use.abandoned |= use.take == number
        if undone:
            self._stage = undone[min(undone)].stage
        if record.discard:
            self._takes = {n: taken for n, taken in self._takes.items() if n < record.take}
        fork = Fork(lineage=record.lineage, parent=record.parent, step=record.version)
        self.forks[record.lineage] = fork
        self._lineage = record.lineage
        self._head = WeightId(lineage=record.lineage, step=record.version)

    @_apply.register
    def _release(self, record: records.TakesReleased) -> None:
        self._takes = {n: taken for n, taken in self._takes.items() if n >= record.take}
