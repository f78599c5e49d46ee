"""Trajectories of a run: the facts that the journal's records tell, and the bodies on demand."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from evolver_async.buffer.log.reader import JournalReader
from evolver_async.runs.results.group_histories import (
    GroupHistory,
    GroupUse,
    MemberHistory,
    RunHistory,
)
from evolver_async.schema import Kind, Task, Trajectory, WeightId


class TrajectoryGone(LookupError):
    """The run has not kept the tokens of a trajectory; the message says how to keep them."""


@dataclass(frozen=True)
class Training:
    """One use of a trajectory by the learner.

    `step`: learner step, as in metrics.jsonl. `lag`: most versions between the trajectory's
    weights and the newest ones at the take; None without sampled tokens. `fate`: "trained", the
    reason of a filter, or "" if the learner has not reported the take. `abandoned`: a resumed
    learner went back to before this step.
    """

    step: int
    lineage: int
    lag: int | None
    fate: str
    abandoned: bool


@dataclass(frozen=True)
class RecordedTrajectory:
    """One trajectory that the buffer accepted, with what became of it.

    `fate` is trained, filtered, evicted or held; `reason` says why for filtered and evicted ones.
    `tokens` counts ACTION tokens. `turns` is None if that record was removed. `kept` is True if
    `load` finds the tokens; episodes of evaluations and explorations are only counted.
    """

    group: int
    member: int
    attempt: int
    kind: Kind
    task: Task
    stage: int
    reward: float
    success: bool
    tokens: int
    turns: int | None
    oldest: WeightId | None
    fate: str
    reason: str
    trainings: tuple[Training, ...]
    kept: bool
    _place: tuple[int, int, int, int] = field(repr=False)
    _reader: JournalReader = field(repr=False, compare=False)

    @property
    def id(self) -> str:
        """Group, member and attempt, as in the samples and logs."""
        return f"{self.group}/{self.member}/{self.attempt}"

    @property
    def env(self) -> str:
        """Name of the environment."""
        return self.task.env

    @property
    def size(self) -> int:
        """Bytes in the journal, 0 if the episode was only counted."""
        return self._place[2]

    @property
    def training(self) -> Training | None:
        """The newest training use that was not abandoned, None without one."""
        uses = [use for use in self.trainings if use.fate == "trained" and not use.abandoned]
        return uses[-1] if uses else None

    @property
    def step(self) -> int | None:
        """Learner step that trained it last, None if none did."""
        return None if self.training is None else self.training.step

    @property
    def lag(self) -> int | None:
        """Version lag when it was trained last, None if it was not or has no sampled tokens."""
        return None if self.training is None else self.training.lag

    def load(self) -> Trajectory:
        """Decode the whole trajectory: tokens, roles, turns, log-probs, versions, labels, rewards.

        Raises TrajectoryGone if the run has not kept it.
        """
        found = self._reader.trajectory(self._place) if self.kept else None
        if found is not None:
            return found
        if not self.size:
            raise TrajectoryGone(f"trajectory {self.id}: {self.kind} episodes are only counted")
        raise TrajectoryGone(
            f"trajectory {self.id}: its journal segment was removed;"
            " buffer.archive=all keeps the segments"
        )


def trajectories(history: RunHistory, reader: JournalReader) -> Iterator[RecordedTrajectory]:
    """Yield the trajectories of a history by group and member."""
    for _, group in sorted(history.groups.items()):
        for number, member in sorted(group.arrived.items()):
            yield _recorded(history, reader, group, number, member)


def _recorded(
    history: RunHistory,
    reader: JournalReader,
    group: GroupHistory,
    number: int,
    member: MemberHistory,
) -> RecordedTrajectory:
    def training(use: GroupUse) -> Training:
        lag = history.lag(use, member.sampled)
        return Training(use.step, use.lineage, lag, use.fate, use.abandoned)

    fate, reason = group.fate
    return RecordedTrajectory(
        group=group.group_id,
        member=number,
        attempt=member.attempt,
        kind=group.kind,
        task=group.task,
        stage=group.stage,
        reward=member.reward,
        success=member.success,
        tokens=member.tokens,
        turns=member.turns,
        oldest=min(member.sampled, default=None),
        fate=fate,
        reason=reason,
        trainings=tuple(map(training, group.uses)),
        kept=reader.kept(member.location),
        _place=member.location,
        _reader=reader,
    )
