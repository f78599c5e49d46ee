"""Requests of the learner: takes, their outcomes, new lineages, journal data that may be deleted.

A take is recorded before its groups leave, so the same key always gets the same groups.
"""

import logging
from dataclasses import dataclass, field

from evolver_async.buffer.log.capacity import DiskCapacity
from evolver_async.buffer.log.store import BufferStore
from evolver_async.buffer.monitor.peers import PAUSE, Activity
from evolver_async.buffer.monitor.status import StatusReport
from evolver_async.buffer.reports import fates_of, mismatch
from evolver_async.buffer.state import records
from evolver_async.buffer.state.evaluations import SetSizes
from evolver_async.buffer.state.groups import FORK
from evolver_async.buffer.tasks.task_source import EvalSet
from evolver_async.config.sections.run import FINAL_SET
from evolver_async.schema import Group, WeightId
from evolver_async.wire.evaluation_results import EvalResult
from evolver_async.wire.messages import (
    Done,
    Fenced,
    GroupReply,
    Groups,
    Kept,
    Ok,
    Reject,
    Reply,
    Resume,
    Resumed,
    Sample,
    Wait,
)

ROLLED_BACK = "rolled_back"  # the reason of groups whose takes a RESUME discards

log = logging.getLogger(__name__)


@dataclass
class LearnerRequests:
    """Answers SAMPLE, DONE, RESUME and KEPT. `eval_sets`: the sets of every stage by name."""

    store: BufferStore
    disk: DiskCapacity
    activity: Activity
    status: StatusReport
    eval_sets: list[dict[str, EvalSet]]
    _delivered: set[WeightId] = field(default_factory=set)

    def sample(self, peer: str, request: Sample, now: float) -> list[Reply]:
        at = self.store.replay.at
        self.activity.learner = peer
        fenced = self._fenced(request.lineage)
        if fenced:
            return [fenced]
        if request.take in at.takes and at.takes[request.take].lineage == at.lineage:
            return self._groups(request.take)
        if request.take > at.next_take:
            return [Reject(reason=self.gap(request.lineage, request.take))]
        if request.take < at.next_take:
            return [Reject(reason=f"take: {request.take}, the next one is {at.next_take}")]
        if not 0 <= request.stage < len(self.eval_sets):
            return [Reject(reason=f"stage: {request.stage} of {len(self.eval_sets)}")]
        before = at.takes.get(request.take - 1)
        if before is not None and not before.reported:
            return [self._wait(peer, f"take {request.take - 1} is not reported yet", now)]
        if request.stage != at.stage:
            self.store.record(records.Switched(stage=request.stage))
            self._evict_other_stages()
        groups = self._repeated(request) or self.store.replay.choose()
        if not groups:
            if self.store.replay.refills_exhausted():
                return [Reject(reason=self.status.refills())]
            if reason := self.status.reason_to_stop(now):
                return [Reject(reason=reason)]
            return [self._wait(peer, self.status.take(now), now)]
        self.store.record(
            records.GroupsTaken(take=request.take, stage=request.stage, groups=groups)
        )
        waits = self.activity.peers[peer].waits
        since = waits["sample"][1] if "sample" in waits else now
        granted = self.activity.granted
        self.activity.data_s = now - max(since, since if granted is None else granted)
        self.activity.served(peer, "sample")
        return self._groups(request.take)

    def _repeated(self, request: Sample) -> list[int]:
        """The groups that an abandoned lineage had for this take; none if they must change."""
        replay = self.store.replay
        taken = replay.to_repeat(request.take)
        if taken is None:
            return []
        reason = replay.unrepeatable(request.take, request.stage)
        if not reason:
            return taken.groups
        log.warning("take %d and later ones are not repeated: %s", request.take, reason)
        self.store.record(records.RepeatsDropped(take=request.take, reason=reason))
        self._evict_other_stages()
        self.store.sweep(FORK)
        return []

    def done(self, peer: str, request: Done, now: float) -> Reply:
        """Record the outcome of a take. A repeated DONE changes nothing."""
        at = self.store.replay.at
        self.activity.learner = peer
        fenced = self._fenced(request.lineage)
        if fenced:
            return fenced
        taken = at.takes.get(request.take)
        if taken is None or taken.lineage != at.lineage:
            return Reject(reason=f"take: {request.take} was never given to lineage {at.lineage}")
        if not taken.reported:
            fates = fates_of(request)
            problem = mismatch(fates, taken.groups, request, at.head)
            problem = problem or self._unknown_set(taken.stage, request.sets)
            if problem:
                return Reject(reason=problem)
            self.store.record(
                records.Reported(
                    take=request.take,
                    version=request.version,
                    fates={group: fates.get(group, "skipped") for group in taken.groups},
                    episodes=self._episodes(taken.stage, request.episodes),
                    delivered=sorted(self._delivered),
                    sets=self._sizes(taken.stage, request.sets),
                )
            )
            self._delivered.clear()
            for group_id in taken.groups:
                if at.groups[group_id].state == "closed":
                    self.store.forget(group_id)
            self.store.sweep()
        return Ok(
            evals=self._results(),
            counters=self.status.counters(now),
            checkpoint=self.disk.wants_checkpoint(),
            failures=self.status.failures.totals(),
        )

    def resume(self, peer: str, request: Resume) -> Reply:
        """Begin a new lineage, unless this process began one before."""
        at = self.store.replay.at
        begun = at.begun.get(request.process)
        if begun is not None and begun == at.lineage:
            return self._resumed()
        if begun is not None:
            return Fenced(reason=f"this process began lineage {begun}, the newest is {at.lineage}")
        if request.incarnation < at.incarnation:
            begun_by = f"lineage {at.lineage} was begun by incarnation {at.incarnation}"
            return Fenced(reason=f"incarnation {request.incarnation}: {begun_by}")
        self.activity.learner = peer
        refusal = self._unknown(request)
        if refusal:
            return Reject(reason=refusal)
        for name, number in (("version", request.version), ("episodes", request.episodes)):
            if number < 0:
                return Reject(reason=f"{name}: {number}")
        for name, stage in (("stage", request.stage), ("eval_stage", request.eval_stage)):
            if not 0 <= stage < len(self.eval_sets):
                return Reject(reason=f"{name}: {stage} of {len(self.eval_sets)}")
        if problem := self._unknown_set(request.eval_stage, request.sets):
            return Reject(reason=problem)
        later = [taken.groups for number, taken in at.takes.items() if number >= request.take]
        undone = sorted(set().union(*later))
        self.store.record(
            records.LineageStarted(
                lineage=at.lineage + 1,
                parent=request.lineage,
                take=request.take,
                version=request.version,
                episodes=self._episodes(request.eval_stage, request.episodes),
                sets=self._sizes(request.eval_stage, request.sets),
                stage=request.eval_stage,
                discard=request.discard,
                process=request.process,
                incarnation=request.incarnation,
            )
        )
        if request.stage != at.stage:
            self.store.record(records.Switched(stage=request.stage))
        self.store.evict(undone if request.discard else [], ROLLED_BACK)
        self._delivered.clear()
        self.store.forget_gone()
        for group_id in self.store.replay.by_state["closed"]:
            self.store.forget(group_id)
        self._evict_other_stages()
        self.store.sweep(FORK)
        return self._resumed()

    def _resumed(self) -> Resumed:
        at = self.store.replay.at
        forks = [at.forks[lineage] for lineage in sorted(at.forks)]
        return Resumed(lineage=at.lineage, forks=forks)

    def _unknown(self, request: Resume) -> str:
        """Reason why the run cannot go on from the learner's state; "" if it can."""
        at = self.store.replay.at
        if request.lineage < 0:
            return f"lineage: {request.lineage}"
        gap = self.gap(request.lineage, 0 if request.discard else request.take)
        if gap:
            return gap
        if request.take < at.kept and not request.discard:
            return f"take: {request.take}, the journal has takes {at.kept} to {at.next_take}"
        if request.lineage == 0 and at.reports and not request.discard:
            return f"lineage: 0, a fresh start, but the run has trained {at.reports} takes"
        return ""

    def gap(self, lineage: int, take: int = 0) -> str:
        """The gap of the journal for a learner of `lineage` before `take`; "" if there is none."""
        at, end = self.store.replay.at, self.store.journal.end()
        if lineage > at.lineage:
            return f"lineage: {end} ends in lineage {at.lineage}, lineage {lineage} is missing"
        if take > at.next_take:
            missing = f"all up to take {take - 1} is missing"
            return f"take: {end} ends before take {at.next_take}, {missing}"
        return ""

    def kept(self, peer: str, request: Kept, now: float) -> Reply:
        replay = self.store.replay
        if request.paused:
            self.activity.waits(peer, PAUSE, f"paused: {request.paused}", now)
        else:
            self.activity.served(peer, PAUSE)
        if not 0 <= request.take <= replay.at.next_take:
            return Reject(reason=f"take: {request.take}, the next one is {replay.at.next_take}")
        at = replay.at
        if request.take > at.kept or request.bytes != at.checkpoint_bytes:
            self.store.record(records.TakesReleased(take=request.take, bytes=request.bytes))
            self.store.spare = True
        return Ok(evals=self._results(), evaluating=self._evaluating())

    def _unknown_set(self, stage: int, names: list[str]) -> str:
        """The error of a request for sets that a stage has not; "" if it has them all."""
        unknown = sorted(set(names) - self.eval_sets[stage].keys() - {FINAL_SET})
        return f"sets: stage {stage} has no {', '.join(unknown)}" if unknown else ""

    def _episodes(self, stage: int, wanted: int) -> int:
        return self.store.state.sources[stage].episodes(wanted)

    def _sizes(self, stage: int, names: list[str]) -> SetSizes:
        sets = self.eval_sets[stage]  # without that of the end where rows have no test split
        return {name: (sets[name].tasks, sets[name].k) for name in names if name in sets}

    def _results(self) -> list[EvalResult]:
        """The results of evaluations; repeated until a DONE confirms that these were received."""
        results = self.store.state.evaluations.results
        self._delivered |= {result.weights for result in results}
        return list(results)

    def _evaluating(self) -> dict[int, int]:
        """Progress by group of the leases that an evaluation needs.

        An episode that no actor has yet needs all leases: one of them must end first.
        """
        groups, leases = self.store.replay.at.groups, self.store.leases
        running = {group_id for group_id, held in groups.items() if held.kind == "eval"}
        waits = self.store.state.evaluations.next() is not None or running & leases.vacant.keys()
        return {
            lease.group_id: lease.progress for lease in leases if waits or lease.group_id in running
        }

    def _fenced(self, lineage: int) -> Fenced | Reject | None:
        newest = self.store.replay.at.lineage
        if lineage == newest:
            return None
        if lineage > newest:
            return Reject(reason=self.gap(lineage))
        return Fenced(reason=f"lineage {lineage}: the newest is {newest}")

    def _wait(self, peer: str, reason: str, now: float) -> Wait:
        if "sample" not in self.activity.peers[peer].waits:
            self.activity.data_from = self.status.members()[0]
        self.activity.waits(peer, "sample", reason, now)
        return Wait(reason=reason, failures=self.status.failures.totals())

    def _evict_other_stages(self) -> None:
        replay = self.store.replay
        left = [
            held.group_id
            for state in ("open", "ready")
            for held in replay.by_state[state].values()
            if held.stage != replay.at.stage and held.kind != "eval"
        ]
        self.store.evict(left, "stage")

    def _groups(self, take: int) -> list[Reply]:
        replay = self.store.replay
        taken = replay.at.takes[take]
        groups = [
            Group(
                group_id=held.group_id,
                task=held.task,
                kind=held.kind,
                stage=held.stage,
                use=replay.uses_before(held, take),
                head=taken.head,
                trajectories=self.store.trajectories(held),
            )
            for held in map(replay.at.groups.__getitem__, taken.groups)
        ]
        return [*(GroupReply(group=group) for group in groups), Groups(count=len(groups))]
