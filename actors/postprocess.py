"""Postprocessing of episodes: judging, delivery to the buffer, contribution to the experience pool.

It runs beside the rollouts: an actor's capacity is free again when the episodes are over, also
while a judge still labels them. Delivery continues after the end of a ticket.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from msgspec.structs import replace

from actors.endpoint.conversations import Conversations
from actors.endpoint.runner import AgentRunner, JudgementMissing, RewardMissing
from actors.engines.weight_sync import WeightsLate
from actors.envs.base import EnvironmentFailure
from actors.experience.guide import ExperienceGuide
from actors.failure_counts import FailureCounts, unread
from actors.judge.judge import Judge, JudgedEpisode
from actors.questioning.grade import regrade
from actors.questioning.questioner import Questioner
from actors.reply_text import FirstReply
from actors.rewards.facts import Unscorable
from actors.rewards.scorer import RewardScorer
from actors.rollout.environment import IdleEnvironments
from actors.rollout.episode import EpisodeLate
from actors.rollout.episode_config import Setting
from actors.rollout.finished import Finished
from actors.scripted.reflection import Reflector
from actors.ticket_progress import TicketProgress
from evolver_async.metrics.activity import DELIVERING, JUDGING, ActivityClock
from evolver_async.schema import Ticket, Trajectory
from evolver_async.wire import messages
from evolver_async.wire.bounded import WireError
from evolver_async.wire.client import Client

log = logging.getLogger(__name__)


class Ungraded(Exception):
    """No grade could be given to an episode; its member has to be played again."""


Component: TypeAlias = (
    Judge | ExperienceGuide | Questioner | AgentRunner | Conversations | Reflector | RewardScorer
)


@dataclass
class ActorComponents:
    """Optional components of an actor beside engine and environments; None if not configured."""

    judge: Judge | None = None
    guide: ExperienceGuide | None = None
    questioner: Questioner | None = None
    agents: AgentRunner | Conversations | None = None
    reflector: Reflector | None = None
    failures: FailureCounts = field(default_factory=FailureCounts)  # theirs and the episodes'
    idle: IdleEnvironments = field(default_factory=IdleEnvironments)
    scorer: RewardScorer | None = None
    first_reply: FirstReply = field(default_factory=FirstReply)
    has_read: bool = False  # some turn of the policy

    def counters(self) -> dict[str, float]:
        """Collect the counters of all components by metric name."""
        counters = [component.counters() for component in self._made()]
        return {name: value for counted in counters for name, value in counted.items()}

    def worked_s(self) -> float:
        """Return the seconds of the agents between their calls."""
        return self.agents.worked_s() if self.agents is not None else 0.0

    def _made(self) -> list[Component]:
        known = (self.judge, self.guide, self.questioner, self.agents, self.reflector, self.scorer)
        return [component for component in known if component is not None]

    async def close(self) -> None:
        for component in self._made():
            await component.close()
        self.idle.processes.close()


class Outbox:
    """Finished trajectories of one ticket. `delivered`: members whose delivery is acknowledged.

    `failures` counts trajectories that cannot be sent.
    """

    def __init__(
        self, client: Client, clock: ActivityClock, ticket: Ticket, failures: FailureCounts
    ) -> None:
        self.delivered: set[int] = set()
        self._client = client
        self._clock = clock
        self._ticket = ticket
        self._failures = failures
        self._sending: set[asyncio.Task[Any]] = set()

    @property
    def missing(self) -> list[int]:
        """Members of the ticket that are not delivered."""
        return sorted(set(self._ticket.members) - self.delivered)

    def send(self, trajectory: Trajectory) -> "asyncio.Task[Any]":
        """Send a trajectory; the task ends when the buffer has stored it.

        It may raise Rejected, or EnvironmentFailure if the trajectory is too large to send.
        """
        task = asyncio.create_task(self._push(trajectory), name=trajectory.trajectory_id)
        self._sending.add(task)
        task.add_done_callback(partial(self._sent, trajectory.member))
        return task

    async def _push(self, trajectory: Trajectory) -> Any:
        try:
            with self._clock.during(DELIVERING):
                return await self._client.request(messages.Push(trajectory=trajectory))
        except WireError as error:
            task = self._ticket.task
            where = f"task {task.task_id}, member {trajectory.member}"
            failure = EnvironmentFailure(task.env, where, "sending the episode", error)
            self._failures.note(failure.kind, failure.name, failure.error)
            raise failure from error

    async def settle(self, within_s: float) -> None:
        """Wait at most `within_s` for outstanding replies, then cancel them."""
        under_way = set(self._sending)
        if not under_way:
            return
        _, late = await asyncio.wait(under_way, timeout=within_s)
        for task in late:
            log.warning("trajectory %s was not taken in %.1f s", task.get_name(), within_s)
            task.cancel()

    def _sent(self, member: int, task: "asyncio.Task[Any]") -> None:
        self._sending.discard(task)
        if task.cancelled():
            return
        if task.exception() is None:
            self.delivered.add(member)
        else:
            log.error("trajectory %s: %s", task.get_name(), task.exception())


@dataclass(eq=False)
class TicketPostprocessing:
    """Postprocessing of one ticket's finished episodes."""

    ticket: Ticket
    setting: Setting
    progress: TicketProgress
    outbox: Outbox
    components: ActorComponents
    begun: list[Finished] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)  # with a known outcome
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def begin(self, finished: Finished) -> None:
        """Start the postprocessing of a finished episode in a task of its own."""
        self.begun.append(finished)
        self._tasks.append(asyncio.create_task(self._process(finished)))

    def cancel(self) -> None:
        """Stop judging; finished episodes are delivered as they are."""
        for task in self._tasks:
            task.cancel()

    async def settle(self) -> None:
        """Wait for all started tasks, contribute the group. Raises Rejected or Ungraded."""
        try:
            ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        except asyncio.CancelledError:  # which has cancelled the tasks as well
            await asyncio.gather(*self._tasks, return_exceptions=True)
            raise
        guide = self.components.guide
        if guide is not None and self.ticket.kind == "rollout" and self.finished:
            transcripts = []
            for one in self.finished:
                reward, success = one.trajectory.reward, one.trajectory.success
                transcripts.append(replace(one.transcript, reward=reward, success=success))
            query, stage = self.finished[0].query, self.ticket.stage
            guide.contribute(self.ticket.task, query, transcripts, stage)
        for error in ended:
            if error is not None:
                raise error

    def note_unread(self, agent: str) -> None:
        """Count a group without a readable turn as a failure of the policy.

        A single member may well be unreadable: it does not count in a repeated attempt, nor after a
        group of this actor that could be read.
        """
        ticket, begun = self.ticket, self.begun
        if ticket.kind != "rollout" or not begun:
            return
        error = unread([one.trajectory for one in begun], self.setting.chat)
        if not error:
            self.components.has_read = True
        elif len(begun) > 1 or not (ticket.attempt or self.components.has_read):
            log.warning("group %d: %s", ticket.group_id, error)
            name = (
                f"rollout.agent={agent}" if agent else f"rollout.format={self.setting.format_name}"
            )
            self.components.failures.note("policy", name, error)

    async def _process(self, finished: Finished) -> None:
        member = finished.trajectory.member
        if finished.rewarded is not None:
            finished = await finished.rewarded()
        try:
            graded = await self._grade(finished)
            if self.components.scorer is not None and self.ticket.kind in ("rollout", "eval"):
                await self._score(self.components.scorer, finished, graded)
        except BaseException as error:
            if finished.settled is not None:
                finished.settled(error)
            raise
        self.finished.append(finished)
        if self.components.first_reply.take_in(self.ticket, finished.trajectory, self.setting):
            self.components.failures.noted.set()  # the next report has the text
        try:
            if self.components.judge is not None and self.ticket.kind == "rollout":
                with self._judging(member, "judging"):
                    await self._label(self.components.judge, finished)
        finally:
            sending = self.outbox.send(finished.trajectory)
            if finished.settled is not None:
                sending.add_done_callback(partial(_settle, finished.settled))
        with self.progress.during(member, "handing in"):
            await asyncio.shield(sending)

    async def _grade(self, finished: Finished) -> bool:
        """Set the reward of a task that its environment cannot check; return True if there was
        such a need. Raises Ungraded."""
        questioner, task = self.components.questioner, self.ticket.task
        if questioner is None or self.ticket.kind != "rollout" or not questioner.grades(task):
            return False
        with self._judging(finished.trajectory.member, "grading"):
            given = await questioner.grade(task, finished.transcript.turns, finished.ending)
        if given is None:
            raise Ungraded(task.task_id)
        regrade(finished.trajectory, given)
        self.progress.count += 1
        return True

    async def _score(self, scorer: RewardScorer, finished: Finished, graded: bool) -> None:
        """Set reward and success by the terms of the configuration. Raises Ungraded."""
        try:
            with self._judging(finished.trajectory.member, "scoring"):
                await scorer.score(
                    self.ticket.task, finished, self.setting, graded, self.ticket.stage
                )
        except Unscorable as error:
            self.components.failures.note("reward", "reward.terms", str(error))
            raise Ungraded(self.ticket.task.task_id) from error
        self.progress.count += 1

    @contextlib.contextmanager
    def _judging(self, member: int, doing: str) -> Iterator[None]:
        with self.progress.clock.during(JUDGING), self.progress.during(member, doing):
            yield

    async def _label(self, judge: Judge, finished: Finished) -> None:
        trajectory = finished.trajectory
        labels, source = await judge.label(_judged(finished))
        if source:
            trajectory.labels = np.array(labels, np.int8)
            trajectory.label_source = source
        self.progress.count += 1


def _settle(settled: Callable[[object], None], sending: "asyncio.Task[Any]") -> None:
    """Tell what became of a trajectory that was sent."""
    cancelled = sending.cancelled()
    settled(None if cancelled else sending.exception() or sending.result())


def _judged(finished: Finished) -> JudgedEpisode:
    """Return a finished episode as judges see it."""
    turns, trajectory = finished.transcript.turns, finished.trajectory
    reward, success = trajectory.reward, trajectory.success
    return JudgedEpisode(finished.query, turns, reward, success, finished.scores)


def release_reason(error: Exception, ticket: Ticket) -> str:
    """Return the reason to release a ticket with; "error" for an unexpected error."""
    match error:
        case WeightsLate():
            log.warning("group %d: weights %s did not arrive", ticket.group_id, ticket.weights)
            return "weights"
        case EnvironmentFailure():
            return "environment"
        case EpisodeLate():
            return "engine"
        case RewardMissing():
            return "reward"
        case Ungraded() | JudgementMissing():
            return "grade"
    return "error"
