"""The learner's side of the buffer: takes, what became of them, new lineages, what may go.

A take is recorded before its groups leave, so the same key always gets the same groups.
"""

import msgspec

from evolver_async.buffer import records
from evolver_async.buffer.activity import Activity
from evolver_async.buffer.book import Book
from evolver_async.buffer.disk import Disk
from evolver_async.buffer.status import Status
from evolver_async.messages import (
    Done,
    Fenced,
    Groups,
    Kept,
    Ok,
    Part,
    Reject,
    Reply,
    Resume,
    Resumed,
    Sample,
    Wait,
)
from evolver_async.schema import EvalResult, Group, WeightId


class Taking:
    """Answers SAMPLE, DONE, RESUME and KEPT."""

    def __init__(
        self, book: Book, disk: Disk, activity: Activity, status: Status, stages: int
    ) -> None:
        self.book = book
        self.disk = disk
        self.activity = activity
        self.status = status
        self.stages = stages
        self._resume: tuple[object, ...] | None = None
        self._delivered: set[WeightId] = set()

    def sample(self, peer: str, request: Sample, now: float) -> list[Reply]:
        at = self.book.replay.at
        self.activity.learner = peer
        fenced = self._fenced(request.lineage)
        if fenced:
            return [fenced]
        if request.take in at.takes and at.takes[request.take].lineage == at.lineage:
            return self._groups(request.take)
        if request.take != at.next_take:
            return [Reject(reason=f"take: {request.take}, the next one is {at.next_take}")]
        if not 0 <= request.stage < self.stages:
            return [Reject(reason=f"stage: {request.stage} of {self.stages}")]
        before = at.takes.get(request.take - 1)
        if before is not None and not before.reported:
            return [self._wait(peer, f"take {request.take - 1} is not reported yet", now)]
        if request.stage != at.stage:
            self.book.record(records.Switched(stage=request.stage))
            self._evict_other_stages()
        groups = self.book.replay.choose()
        if not groups and self.book.replay.gives_up():
            return [Reject(reason=self.status.refills())]
        if not groups and (reason := self.status.hopeless(now)):
            return [Reject(reason=reason)]
        if not groups:
            return [self._wait(peer, self.status.take(now), now)]
        self.book.record(records.Taken(take=request.take, stage=request.stage, groups=groups))
        self.activity.served(peer, "sample")
        return self._groups(request.take)

    def done(self, peer: str, request: Done, now: float) -> Reply:
        """What became of a take. A repeated DONE changes nothing."""
        at = self.book.replay.at
        self.activity.learner = peer
        fenced = self._fenced(request.lineage)
        if fenced:
            return fenced
        taken = at.takes.get(request.take)
        if taken is None or taken.lineage != at.lineage:
            return Reject(reason=f"take: {request.take} was never given to lineage {at.lineage}")
        if not taken.reported:
            fates = _fates(request)
            problem = _mismatch(fates, taken.groups, request, at.head)
            if problem:
                return Reject(reason=problem)
            self.book.record(
                records.Reported(
                    take=request.take,
                    version=request.version,
                    fates={group: fates.get(group, "skipped") for group in taken.groups},
                    episodes=request.episodes,
                    delivered=sorted(self._delivered),
                )
            )
            self._delivered.clear()
            for group_id in taken.groups:
                if at.groups[group_id].state == "closed":
                    self.book.forget(group_id)
            self.book.sweep()
        return Ok(
            evals=self._results(),
            counters=self.status.counters(now),
            checkpoint=self.disk.wants_checkpoint(),
            failures=self.status.failures.totals(),
        )

    def resume(self, peer: str, request: Resume) -> Reply:
        at = self.book.replay.at
        self.activity.learner = peer
        if not 0 <= request.lineage <= at.lineage:
            return Reject(reason=f"lineage: {request.lineage}, the newest is {at.lineage}")
        if not at.kept <= request.take <= at.next_take:
            return Reject(
                reason=f"take: {request.take}, the journal has takes {at.kept} to {at.next_take}"
            )
        if request.version < 0:
            return Reject(reason=f"version: {request.version}")
        if request.episodes < 0:
            return Reject(reason=f"episodes: {request.episodes}")
        if not 0 <= request.stage < self.stages:
            return Reject(reason=f"stage: {request.stage} of {self.stages}")
        asked = (peer, *msgspec.structs.astuple(request))
        used = any(taken.lineage == at.lineage for taken in at.takes.values())
        if asked != self._resume or used:  # else the reply was lost and the request sent again
            self.book.record(
                records.Resumed(
                    lineage=at.lineage + 1,
                    parent=request.lineage,
                    take=request.take,
                    version=request.version,
                    episodes=request.episodes,
                    stage=request.stage,
                )
            )
            self._resume = asked
            self._delivered.clear()
            self.book.forget_gone()
            for group_id in self.book.replay.by_state["closed"]:
                self.book.forget(group_id)
            self._evict_other_stages()
            self.book.sweep()
        forks = [at.forks[lineage] for lineage in sorted(at.forks)]
        return Resumed(lineage=at.lineage, forks=forks)

    def kept(self, peer: str, request: Kept, now: float) -> Reply:
        replay = self.book.replay
        self._pause(peer, request.paused, now)
        if not 0 <= request.take <= replay.at.next_take:
            return Reject(reason=f"take: {request.take}, the next one is {replay.at.next_take}")
        at = replay.at
        if request.take > at.kept or request.bytes != at.checkpoint_bytes:
            self.book.record(records.Kept(take=request.take, bytes=request.bytes))
            self.book.spare = True
        return Ok(evals=self._results())

    def _results(self) -> list[EvalResult]:
        """The results of evaluations; repeated until a DONE says that these were received."""
        results = self.book.state.evaluations.results
        self._delivered |= {result.weights for result in results}
        return list(results)

    def _pause(self, peer: str, reason: str, now: float) -> None:
        """A paused learner says so again and again, for people to see."""
        if reason:
            self.activity.waits(peer, "pause", f"paused: {reason}", now)
        else:
            self.activity.served(peer, "pause")

    def _fenced(self, lineage: int) -> Fenced | None:
        newest = self.book.replay.at.lineage
        if lineage == newest:
            return None
        return Fenced(reason=f"lineage {lineage}: the newest is {newest}")

    def _wait(self, peer: str, reason: str, now: float) -> Wait:
        self.activity.waits(peer, "sample", reason, now)
        return Wait(reason=reason, failures=self.status.failures.totals())

    def _evict_other_stages(self) -> None:
        replay = self.book.replay
        left = [
            held.group_id
            for state in ("open", "ready")
            for held in replay.by_state[state].values()
            if held.stage != replay.at.stage and held.kind != "eval"
        ]
        self.book.evict(left, "stage")

    def _groups(self, take: int) -> list[Reply]:
        replay = self.book.replay
        replies: list[Reply] = []
        for group_id in replay.at.takes[take].groups:
            held = replay.at.groups[group_id]
            group = Group(
                group_id=group_id,
                task=held.task,
                kind=held.kind,
                stage=held.stage,
                use=replay.uses_before(held, take),
                trajectories=self.book.trajectories(held),
            )
            replies.append(Part(group=group))
        return [*replies, Groups(count=len(replies))]


def _fates(request: Done) -> dict[int, str]:
    fates = dict.fromkeys(request.trained, "trained")
    for reason, groups in request.filtered.items():
        fates |= dict.fromkeys(groups, reason)
    return fates


def _mismatch(
    fates: dict[int, str], taken: list[int], request: Done, head: WeightId | None
) -> str | None:
    """What a DONE gets wrong about its take. Only a skipped one may leave groups out."""
    count = len(request.trained) + sum(len(groups) for groups in request.filtered.values())
    if count != len(fates):
        return f"trained, filtered: a group twice in take {request.take}"
    if "trained" in request.filtered:
        return "filtered: 'trained' is no reason"
    foreign = sorted(fates.keys() - set(taken))
    if foreign:
        return f"trained, filtered: groups {foreign} are not of take {request.take}"
    left_out = sorted(set(taken) - fates.keys())
    if left_out and not request.skipped:
        return f"trained, filtered: groups {left_out} of take {request.take} are missing"
    if head is not None and request.version < head.step:
        return f"version: {request.version}, it was {head.step}"
    if request.episodes < 0:
        return f"episodes: {request.episodes}"
    return None
