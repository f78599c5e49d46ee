"""One group of episodes: its members run concurrently, each is delivered as it ends."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from actors.engines.engine import Engine, Generation, Request
from actors.envs.base import EnvironmentFailure
from actors.rollout.environment import TimedEnvironment
from actors.rollout.episode import EpisodeLate, run_episode
from actors.rollout.episode_config import Setting
from actors.rollout.episode_policy import Advice, EpisodePolicy, Guide
from actors.rollout.finished import Deliver
from actors.ticket_progress import TicketProgress
from evolver_async.metrics.activity import PLAYING
from evolver_async.randomness import key
from evolver_async.schema import Ticket

log = logging.getLogger(__name__)


@dataclass(eq=False)
class LearnedPolicy(EpisodePolicy):
    """Policy that samples one member's turns from the engine; every turn's draws have their own
    key."""

    kind: ClassVar[Literal["learned", "scripted"]] = "learned"

    engine: Engine
    ticket: Ticket
    member: int
    setting: Setting
    guide: Guide | None

    async def advise(self, world: TimedEnvironment, query: str, state: str) -> Advice:
        return Advice() if self.guide is None else await self.guide.advise(query, state)

    def count_unguided(self) -> None:
        if self.guide is not None:
            self.guide.count_unguided()

    async def write(self, world: TimedEnvironment, context: list[int], turn: int) -> Generation:
        sampling, setting = self.ticket.sampling, self.setting
        request = Request(
            tokens=context,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop_tokens=setting.chat.stop_tokens,
            stop_strings=setting.format.stop_strings,
            session=self._session,
            # By the place of the turn, not by the order of requests: a serial run repeats it.
            seed=key(setting.seed, "sample", self._session, turn),
        )
        return await self.engine.generate(request)

    @property
    def _session(self) -> str:
        return f"{self.ticket.group_id}/{self.member}/{self.ticket.attempt}"

    def close(self) -> None:
        self.engine.release(self._session)


async def side_by_side(
    ticket: Ticket,
    setting: Setting,
    progress: TicketProgress,
    play: Callable[[int], Awaitable[None]],
) -> EnvironmentFailure | EpisodeLate | None:
    """`play` all members of a ticket concurrently to their ends; return one of their failures, if
    any.

    An EnvironmentFailure comes before an EpisodeLate; anything else is raised at once.
    """
    failures: list[EnvironmentFailure | EpisodeLate] = []

    async def run(member: int) -> None:
        try:
            with progress.clock.during(PLAYING):
                await play(member)
        except (EnvironmentFailure, EpisodeLate) as failure:
            cause = setting.failures.traced(failure.name, failure.__cause__)
            log.warning("group %d: %s", ticket.group_id, failure, exc_info=cause)
            setting.failures.note(failure.kind, failure.name, failure.error)
            failures.append(failure)
        progress.played += 1

    async with asyncio.TaskGroup() as group:
        for member in ticket.members:
            group.create_task(run(member))
    return min(failures, key=lambda failure: isinstance(failure, EpisodeLate), default=None)


async def run_members(
    ticket: Ticket,
    setting: Setting,
    policy_of: Callable[[int], EpisodePolicy],
    progress: TicketProgress,
    deliver: Deliver,
) -> None:
    """Run a ticket's members concurrently and `deliver` each as it ends.

    An EnvironmentFailure, else an EpisodeLate, is raised after all the others have ended.
    """

    async def play(member: int) -> None:
        deliver(await run_episode(ticket, member, setting, policy_of(member), progress))

    if failure := await side_by_side(ticket, setting, progress, play):
        raise failure


async def run_group(
    ticket: Ticket,
    setting: Setting,
    engine: Engine,
    progress: TicketProgress,
    deliver: Deliver,
    guide: Guide | None = None,
) -> None:
    """Run a ticket's members with the engine; see `run_members`."""

    def policy_of(member: int) -> EpisodePolicy:
        return LearnedPolicy(engine, ticket, member, setting, guide)

    await run_members(ticket, setting, policy_of, progress, deliver)
