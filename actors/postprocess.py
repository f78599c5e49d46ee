"""What comes after an episode: its turns are judged, it is handed in, others learn from it.

All of it off the rollout's way: an actor's room for groups is free again when their episodes are
over, whatever a judge still has to say about them.
"""

import asyncio
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from actors.endpoint.runner import AgentRunner
from actors.experience.guide import ServiceGuide
from actors.failures import FailureCounts
from actors.judge.judge import Judge, JudgedEpisode
from actors.outbox import Outbox
from actors.progress import Progress
from actors.questioning.grade import regrade
from actors.questioning.questioner import Questioner
from actors.rollout.episode import Finished
from actors.scripted.reflection import Reflector
from evolver_async.schema import Ticket


class Ungraded(Exception):
    """Nobody can tell what an episode is worth; its member is to be played again."""


@dataclass
class Mechanisms:
    """Who else has a part in this actor's episodes; None where the configuration wants nobody."""

    judge: Judge | None = None
    guide: ServiceGuide | None = None
    questioner: Questioner | None = None
    agents: AgentRunner | None = None
    reflector: Reflector | None = None
    failures: FailureCounts = field(default_factory=FailureCounts)  # theirs and the episodes'

    def counters(self) -> dict[str, float]:
        """What they count, by metric name."""
        counted: dict[str, float] = {}
        for mechanism in self._all():
            if mechanism is not None:
                counted |= mechanism.counters()
        return counted

    def _all(
        self,
    ) -> tuple[Judge | ServiceGuide | Questioner | AgentRunner | Reflector | None, ...]:
        return self.judge, self.guide, self.questioner, self.agents, self.reflector

    async def close(self) -> None:
        for mechanism in self._all():
            if mechanism is not None:
                await mechanism.close()


class Aftermath:
    """What becomes of one ticket's finished episodes."""

    def __init__(
        self, ticket: Ticket, progress: Progress, outbox: Outbox, mechanisms: Mechanisms
    ) -> None:
        self.ticket = ticket
        self.progress = progress
        self.outbox = outbox
        self.mechanisms = mechanisms
        self.begun: list[Finished] = []
        self.finished: list[Finished] = []  # whose outcome is known
        self._endings: list[asyncio.Task[None]] = []

    def begin(self, finished: Finished) -> None:
        """An episode is over; the rest of it goes on by itself."""
        self.begun.append(finished)
        self._endings.append(asyncio.create_task(self._end(finished)))

    def cancel(self) -> None:
        """No more judging: what is finished is handed in as it is."""
        for ending in self._endings:
            ending.cancel()

    async def settle(self) -> None:
        """Wait for everything that `begin` began. Raises Rejected or Ungraded."""
        try:
            ended = await asyncio.gather(*self._endings, return_exceptions=True)
        except asyncio.CancelledError:  # which has cancelled the endings as well
            await asyncio.gather(*self._endings, return_exceptions=True)
            raise
        guide = self.mechanisms.guide
        if guide is not None and self.ticket.kind == "rollout" and self.finished:
            transcripts = [
                replace(
                    one.transcript, reward=one.trajectory.reward, success=one.trajectory.success
                )
                for one in self.finished
            ]
            guide.contribute(self.ticket.task, self.finished[0].query, transcripts)
        for error in ended:
            if error is not None:
                raise error

    async def _end(self, finished: Finished) -> None:
        member = finished.trajectory.member
        await self._grade(finished)
        self.finished.append(finished)
        try:
            if self.mechanisms.judge is not None and self.ticket.kind == "rollout":
                with self.progress.during(member, "judging"):
                    await self._label(self.mechanisms.judge, finished)
        finally:
            sending = self.outbox.send(finished.trajectory)
        with self.progress.during(member, "handing in"):
            await asyncio.shield(sending)

    async def _grade(self, finished: Finished) -> None:
        """The reward of a task that its environment cannot check. Raises Ungraded."""
        questioner, task = self.mechanisms.questioner, self.ticket.task
        if questioner is None or self.ticket.kind != "rollout" or not questioner.grades(task):
            return
        with self.progress.during(finished.trajectory.member, "grading"):
            given = await questioner.grade(task, finished.transcript.turns, finished.ending)
        if given is None:
            raise Ungraded(task.task_id)
        regrade(finished.trajectory, given)
        self.progress.count += 1

    async def _label(self, judge: Judge, finished: Finished) -> None:
        trajectory = finished.trajectory
        labels, source = await judge.label(
            JudgedEpisode(
                query=finished.query,
                turns=finished.transcript.turns,
                reward=trajectory.reward,
                success=trajectory.success,
                scores=finished.scores,
            )
        )
        if source:
            trajectory.labels = np.array(labels, np.int8)
            trajectory.label_source = source
        self.progress.count += 1
