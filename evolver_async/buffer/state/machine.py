"""Durable state of the buffer: replay, ledger, tasks, guidance, evaluations; records change it.

The live service and a restart run the same `apply`, so both reach the same state.
"""

import msgspec

from evolver_async.buffer.state import records
from evolver_async.buffer.state.admission import StageNumbers
from evolver_async.buffer.state.evaluations import EvaluationQueue
from evolver_async.buffer.state.groups import (
    FORK,
    UNTRAINED,
    ArrivedMember,
    HeldGroup,
    Location,
    ending,
)
from evolver_async.buffer.state.guidance import GuidanceRecord
from evolver_async.buffer.state.ledger import HELD, Amount, Ledger
from evolver_async.buffer.state.replay import Replay
from evolver_async.buffer.tasks.stream import TaskStream
from evolver_async.buffer.tasks.task_source import TaskSource

# Conversations of people whose arrival is remembered. An actor that was killed sends again what was
# not acknowledged, by when others have not delivered as many.
MOST_CONVERSATIONS = 1 << 16
NOWHERE: Location = (0, 0, 0, 0)  # of a trajectory that is not kept


class BufferState:
    """State machine over records. `stages` and `sources` hold one entry a stage of the run."""

    def __init__(
        self, run_id: str, seed: int, stages: list[StageNumbers], sources: list[TaskSource]
    ) -> None:
        self.run_id = run_id
        self.sources = sources
        self.replay = Replay(stages)
        self.ledger = Ledger()
        self.tasks = TaskStream(seed, sources[0])
        self.guidance = GuidanceRecord()
        self.evaluations = EvaluationQueue()
        self.conversations: dict[int, None] = {}  # of people, that arrived; the oldest first

    def snapshot(self) -> records.StateSnapshot:
        return records.StateSnapshot(
            run_id=self.run_id,
            position=self.replay.at,
            ledger=self.ledger,
            cursor=self.tasks.cursor,
            guidance=self.guidance,
            evaluations=self.evaluations,
            conversations=[*self.conversations] or msgspec.UNSET,
        )

    def restore(self, snapshot: records.StateSnapshot) -> None:
        """Take over a snapshot. Raises ValueError if it is of another run."""
        if snapshot.run_id != self.run_id:
            raise ValueError(f"belongs to run {snapshot.run_id!r}, not to {self.run_id!r}")
        self.replay.restore(snapshot.position)
        self.ledger = snapshot.ledger
        self.guidance = snapshot.guidance
        self.evaluations = snapshot.evaluations
        self.conversations = dict.fromkeys(snapshot.conversations or ())
        self.tasks.switch(self.sources[snapshot.position.stage])
        self.tasks.restore(snapshot.cursor)

    def held(self) -> dict[str, dict[str, Amount]]:
        """Count the open, ready and taken groups by kind."""
        held: dict[str, dict[str, Amount]] = {}
        for state in HELD:
            for group in self.replay.by_state[state].values():
                amounts = held.setdefault(group.kind, {name: Amount() for name in HELD})
                amounts[state].add(_amount(group))
        return held

    def check(self) -> None:
        """Raise Inconsistency if the ledger does not close."""
        self.ledger.check(self.held())

    def apply(self, record: records.AnyRecord, location: Location = NOWHERE) -> None:
        """Apply a record. `location`: the place of the trajectory of an Arrived."""
        match record:
            case records.Arrived():  # the most frequent one
                self._arrived(record, location)
            case records.Granted():
                self._granted(record)
            case records.Reissued():
                self.replay.reissue(record)
            case records.Failed():
                held = self.replay.at.groups[record.group_id]
                held.failures += 1
                if held.pinned is None:
                    self.tasks.failed(held.task)
            case records.Evicted():
                for group_id in record.groups:
                    self._evicted(group_id, record.reason)
            case records.Quarantined():
                self.tasks.quarantine(record.task_id, record.reason)
            case records.Offered():
                self.tasks.offer(record.tasks, record.duplicates)
            case records.Switched():
                self._enter_stage(record.stage)
            case records.GroupsTaken():
                self.replay.take(record.take, record.stage, record.groups)
                for group_id in record.groups:
                    self.tasks.taken(self.replay.at.groups[group_id].task)
            case records.RepeatsDropped():
                self.replay.drop_repeats(record.take, record.reason)
            case records.Reported():
                self._reported(record)
            case records.LineageStarted():
                self._resumed(record)
            case records.TakesReleased():
                self.replay.keep(record.take, record.bytes)
            case records.StateSnapshot():
                self.restore(record)

    def _granted(self, record: records.Granted) -> None:
        if record.pinned is None:
            stage = self.replay.at.stage
            use = self.tasks.explore if record.kind == "explore" else self.tasks.take
            use(record.task)
            if record.kind == "rollout":
                self.guidance.granted(bool(record.guided))
        else:
            stage = self.evaluations.granted(record.pinned, record.episode)
        self.replay.open(record, stage)
        self.ledger.receive(record.kind, Amount(groups=1))

    def _arrived(self, record: records.Arrived, location: Location) -> None:
        member = ArrivedMember(
            attempt=record.attempt,
            tokens=record.tokens,
            bytes=record.bytes,
            reward=record.reward,
            success=record.success,
            guided=record.guided,
            sampled=record.sampled,
            location=location,
            players=record.players,
        )
        held = self.replay.arrive(record.group_id, record.member, member)
        self.ledger.arrive(held.kind, record.tokens, record.turns)
        if record.conversation:
            self.conversations[record.conversation] = None
            if len(self.conversations) > MOST_CONVERSATIONS:
                del self.conversations[next(iter(self.conversations))]
        if held.missing:
            return
        if held.pinned is None:
            successes = sum(member.success for member in held.arrived.values())
            learned = held.kind == "rollout"
            self.tasks.completed(held.task, successes / len(held.members) if learned else None)
            if learned:
                self.guidance.completed(held)
                self._repeat_failed(held, successes)
        else:
            facts = record.content, record.success, record.reward, record.turns, record.numbers
            self.evaluations.arrived(held.pinned, held.episode, *facts)
        if held.kind in UNTRAINED:
            reason = "explored" if held.pinned is None else "evaluated"
            self.ledger.close(held.kind, "filtered", reason, _amount(held))
            self.replay.evict(record.group_id)

    def _repeat_failed(self, held: HeldGroup, successes: int) -> None:
        """Queue the task of an unguided group that failed throughout for one guided group.

        Each repeat follows a group without guidance, so at most every second group is one.
        """
        repeats = self.replay.numbers.repeats_failed and held.stage == self.replay.at.stage
        if repeats and not successes and not held.guided:
            self.tasks.queue_again(held.task, guided=True)

    def _evicted(self, group_id: int, reason: str) -> None:
        held = self.replay.evict(group_id, reason)
        fate, why = ending(held, reason)
        self.ledger.close(held.kind, fate, why, _amount(held))
        guided = bool(held.guided)
        if fate == "evicted" and reason == FORK:
            self.tasks.queue_again(held.task, guided=guided)
        elif fate == "evicted" and reason in ("age", "stale"):
            self.tasks.requeue(held.task, reason == "stale", guided=guided, waited=held.wait)
        if held.pinned is not None and reason != "lineage":
            self.evaluations.lost(held.pinned, held.episode)

    def _reported(self, record: records.Reported) -> None:
        for held in self.replay.report(record.take, record.version, record.fates):
            self.ledger.close(held.kind, *held.fate, _amount(held))
        self.evaluations.confirm(record.delivered)
        head = self.replay.at.head
        if record.episodes and head is not None:
            stage = self.replay.at.takes[record.take].stage
            self.evaluations.request(head, record.take, stage, record.episodes, record.sets)

    def _resumed(self, record: records.LineageStarted) -> None:
        before = self.replay.at.stage
        for held in self.replay.settle(record.take):
            self.ledger.close(held.kind, *held.fate, _amount(held))
        for held, fate, reason in self.replay.resume(
            record.lineage, record.parent, record.take, record.version, discard=record.discard
        ):
            self.ledger.reopen(held.kind, fate, reason, _amount(held))
        self.replay.at.incarnation = record.incarnation
        if record.process:
            self.replay.at.begun[record.process] = record.lineage
        for held in [held for held in self.replay.live("eval") if held.pinned]:
            self._evicted(held.group_id, "lineage")
        self.evaluations.abandon(record.lineage)
        # A new start of the learner tries them again: their cause may have been mended.
        self.tasks.lift_quarantines()
        head = self.replay.at.head
        if record.episodes and head is not None:
            asked = record.stage, record.episodes, record.sets
            self.evaluations.request(head, record.take - 1, *asked)
        if self.replay.at.stage != before:
            self._begin_stage(self.replay.at.stage)

    def _enter_stage(self, stage: int) -> None:
        at = self.replay.at
        at.stage = stage
        at.zero_spread = 0
        at.floor = at.head.step if at.head is not None else 0
        self._begin_stage(stage)

    def _begin_stage(self, stage: int) -> None:
        self.tasks.switch(self.sources[stage])
        self.guidance = GuidanceRecord()


def _amount(held: HeldGroup) -> Amount:
    return Amount(groups=1, trajectories=len(held.arrived), tokens=held.tokens)
