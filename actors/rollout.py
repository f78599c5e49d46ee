"""One episode and one group of episodes: environment, policy and conversation taking turns.

No sockets here. Tokens are recorded as the model saw them: PROMPT up to where it first writes,
ACTION for what it sampled, OBSERVATION for everything between. Times are the loop's, so they are
virtual in a serial run.
"""

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from actors.chat import Chat, Stream
from actors.engines.base import Engine, Generation, Request
from actors.envs.base import Env, EnvironmentFailure, Step
from actors.progress import Progress
from actors.turns import TurnFormat
from actors.world import World
from evolver_async.schema import Role, Ticket, Trajectory, TurnFlag, key

log = logging.getLogger(__name__)

INVALID = "invalid answer\n{}"  # then the last observation again: nothing has happened


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all episodes of a stage share. `max_length` bounds the tokens of a whole episode."""

    chat: Chat
    format: TurnFormat
    actor: str
    incarnation: int
    seed: int
    max_turns: int
    max_length: int
    format_penalty: float
    format_errors: int  # turns that cannot be read after which an episode ends; 0: none ends it
    step_timeout_s: float
    episode_timeout_s: float
    latency: str  # of every step: none, fixed or lognormal
    latency_median_s: float
    latency_sigma: float


class EpisodeLate(Exception):
    """An episode missed its deadline, and most of its time was the engine's."""


class Policy(Protocol):
    """Whoever writes the ACTION tokens of one episode."""

    kind: Literal["learned", "scripted"]

    async def write(self, world: World, context: list[int], turn: int) -> Generation:
        """The turn that follows `context`. A scripted policy has no `weights` and log-probs 0."""
        ...

    def close(self) -> None: ...


class Learned:
    """The engine, writing for one member of a ticket; every turn's draws have their own key."""

    kind: Literal["learned", "scripted"] = "learned"

    def __init__(self, engine: Engine, ticket: Ticket, member: int, setting: Setting) -> None:
        self._engine = engine
        self._sampling = ticket.sampling
        self._stop_tokens = setting.chat.stop_tokens
        self._stop_strings = setting.format.stop_strings
        self._session = f"{ticket.group_id}/{member}/{ticket.attempt}"
        self._seed = setting.seed

    async def write(self, world: World, context: list[int], turn: int) -> Generation:
        return await self._engine.generate(
            Request(
                tokens=context,
                max_tokens=self._sampling.max_tokens,
                temperature=self._sampling.temperature,
                stop_tokens=self._stop_tokens,
                stop_strings=self._stop_strings,
                session=self._session,
                seed=key(self._seed, "sample", self._session, turn),
            )
        )

    def close(self) -> None:
        self._engine.release(self._session)


class Episode:
    """One member's way through its task."""

    def __init__(
        self, world: World, ticket: Ticket, member: int, setting: Setting, progress: Progress
    ) -> None:
        self.world = world
        self.ticket = ticket
        self.member = member
        self.setting = setting
        self.progress = progress
        self.stream = Stream()
        self.observation = ""
        self.rewards: list[float] = []
        self.flags: list[TurnFlag] = []
        self.steps = 0
        self.success = self.terminated = self.truncated = False
        self.generate_s = 0.0

    async def play(self, policy: Policy) -> Trajectory:
        """Reset, then turns until the end, a limit, or too little room for a whole one."""
        setting, chat, style = self.setting, self.setting.chat, self.setting.format
        loop = asyncio.get_running_loop()
        began = loop.time()
        room = setting.max_length - self.ticket.sampling.max_tokens
        dynamics_seed = key(self.ticket.dynamics_seed, self.member)
        await self.world.open()
        env = self.world.env
        self.observation = await self.world.call(
            "reset", env.reset, self.ticket.task, dynamics_seed
        )
        prompt = first_prompt(setting, env, self.observation)
        if len(prompt) > room:
            cause = f"first prompt of {len(prompt)} tokens leaves no turn in policy.max_length"
            raise self.world.failure("first prompt", loop.time() - began, ValueError(cause))
        self.stream.read(prompt, Role.PROMPT)
        for turn in range(setting.max_turns):
            asked = loop.time()
            try:
                with self.progress.during(self.member, f"generation of turn {turn}"):
                    generation = await policy.write(self.world, list(self.stream.tokens), turn)
            finally:
                self.generate_s += loop.time() - asked
            self.progress.count += len(generation.tokens)
            self.stream.write(generation, turn)
            shown = await self._act(style.parse(chat.text_of(generation.tokens)))
            if self.terminated or self.truncated or turn == setting.max_turns - 1:
                break
            if 0 < setting.format_errors <= self.flags.count(TurnFlag.FORMAT_ERROR):
                break
            ended = generation.tokens[-1:] == [chat.end_of_turn]
            delta = chat.next(shown, style.prefix, ended)
            if len(self.stream.tokens) + len(delta) > room:
                break
            self.stream.read(delta, Role.OBSERVATION)
        return self._trajectory(policy.kind, loop.time() - began)

    async def _act(self, actions: list[str] | None) -> str:
        """Carry out one turn's actions; returns what the next user message says."""
        reward, valid = 0.0, actions is not None
        for action in actions or []:
            step: Step = await self.world.call(
                "step", self.world.env.step, action, latency_s=self._latency_s()
            )
            self.steps += 1
            self.progress.count += 1
            self.observation = step.observation
            reward += step.reward
            valid = valid and step.info.valid
            self.success = step.info.success
            self.terminated, self.truncated = step.terminated, step.truncated
            if step.terminated or step.truncated:
                break
        self.rewards.append(reward + (0.0 if valid else self.setting.format_penalty))
        self.flags.append(TurnFlag(0) if valid else TurnFlag.FORMAT_ERROR)
        return self.observation if valid else INVALID.format(self.observation)

    def late(self, kind: Literal["learned", "scripted"]) -> EnvironmentFailure | EpisodeLate:
        """Whose fault it is that the deadline was missed: a slow engine makes no task bad."""
        doing, seconds = self.progress.last[self.member]
        limit_s = self.setting.episode_timeout_s
        cause = f"env.episode_timeout_s is {limit_s:g}, {self.generate_s:.1f} s were the policy's"
        failure = self.world.failure(doing, seconds, TimeoutError(cause))
        slow_engine = kind == "learned" and self.generate_s > limit_s / 2
        return EpisodeLate(str(failure)) if slow_engine else failure

    def _latency_s(self) -> float:
        """This step's injected latency; the draw belongs to the step."""
        setting, ticket = self.setting, self.ticket
        if setting.latency == "none":
            return 0.0
        if setting.latency == "fixed":
            return setting.latency_median_s
        parts = ("latency", ticket.group_id, self.member, ticket.attempt, self.steps)
        rng = random.Random(key(setting.seed, *parts))
        return setting.latency_median_s * rng.lognormvariate(0.0, setting.latency_sigma)

    def _trajectory(self, kind: Literal["learned", "scripted"], total_s: float) -> Trajectory:
        turns = len(self.rewards)
        return Trajectory(
            group_id=self.ticket.group_id,
            member=self.member,
            attempt=self.ticket.attempt,
            actor=self.setting.actor,
            incarnation=self.setting.incarnation,
            sequences=[self.stream.sequence()],
            reward=math.fsum(self.rewards),
            success=self.success,
            terminated=self.terminated,
            truncated=not self.terminated,
            turn_rewards=np.array(self.rewards, np.float32),
            turn_flags=np.array(self.flags, np.uint8),
            labels=np.zeros(turns, np.int8),
            label_source="",
            experience_ids=[],
            policy=kind,
            timing={
                "env_s": self.world.spent_s,
                "generate_s": self.generate_s,
                "total_s": total_s,
            },
        )


def first_prompt(setting: Setting, env: Env, observation: str) -> list[int]:
    """The tokens that an episode begins with, the forced prefix of the first turn included."""
    style = setting.format
    return setting.chat.first(f"{env.instructions} {style.instructions}", observation, style.prefix)


async def run_episode(
    ticket: Ticket, member: int, setting: Setting, policy: Policy, progress: Progress
) -> Trajectory:
    """Run one member.

    EnvironmentFailure where its environment raised or missed a deadline, EpisodeLate where the
    whole episode did because of the engine.
    """
    world = World(ticket, member, setting.step_timeout_s, progress)
    episode = Episode(world, ticket, member, setting, progress)
    try:
        async with asyncio.timeout(setting.episode_timeout_s) as limit:
            trajectory = await episode.play(policy)
    except TimeoutError:
        world.abandon()
        if limit.expired():
            raise episode.late(policy.kind) from None
        raise
    except BaseException:
        world.abandon()
        raise
    finally:
        policy.close()
    await world.close()
    return trajectory


async def run_members(
    ticket: Ticket,
    setting: Setting,
    policy_of: Callable[[int], Policy],
    progress: Progress,
    deliver: Callable[[Trajectory], Awaitable[None]],
) -> None:
    """Run a ticket's members side by side and `deliver` each as it ends.

    An EnvironmentFailure, else an EpisodeLate, is raised after all the others are delivered.
    """
    failures: list[EnvironmentFailure | EpisodeLate] = []

    async def run(member: int) -> None:
        try:
            trajectory = await run_episode(ticket, member, setting, policy_of(member), progress)
        except (EnvironmentFailure, EpisodeLate) as failure:
            log.warning("group %d: %s", ticket.group_id, failure)
            failures.append(failure)
        else:
            with progress.during(member, "handing in"):
                await deliver(trajectory)

    async with asyncio.TaskGroup() as group:
        for member in ticket.members:
            group.create_task(run(member))
    failures.sort(key=lambda failure: isinstance(failure, EpisodeLate))
    if failures:
        raise failures[0]


async def run_group(
    ticket: Ticket,
    setting: Setting,
    engine: Engine,
    progress: Progress,
    deliver: Callable[[Trajectory], Awaitable[None]],
) -> None:
    """Run a ticket's members with the engine; see `run_members`."""

    def policy_of(member: int) -> Policy:
        return Learned(engine, ticket, member, setting)

    await run_members(ticket, setting, policy_of, progress, deliver)
