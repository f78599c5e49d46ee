"""One episode: environment, policy and conversation taking turns.

No sockets here. Tokens are recorded as the model saw them, a Sequence for every context (see
`conversation.py`): PROMPT up to where it first writes, EXPERIENCE within it, ACTION for what it
sampled, OBSERVATION for everything between. Times are the loop's, so they are virtual in a serial
run.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from actors.engines.base import Generation
from actors.envs.base import Concluding, EnvironmentFailure, Located, Scored, Step
from actors.formats.chat import encodable
from actors.formats.tool_calls import ANSWER_TOOL, InvalidCall, called
from actors.formats.turns import SEPARATOR
from actors.progress import TicketProgress
from actors.rollout.conversation import Conversation, system_message, tool_names
from actors.rollout.environment import TimedEnvironment
from actors.rollout.episode_config import Setting
from evolver_async.schema import (
    SCRIPTED,
    FailureKind,
    Ticket,
    Trajectory,
    Transcript,
    Turn,
    TurnFlag,
    key,
)

log = logging.getLogger(__name__)


class Advice(NamedTuple):
    """Experience for one episode; no text, no guidance."""

    text: str = ""
    ids: tuple[int, ...] = ()


class Guide(Protocol):
    """Whoever knows what earlier episodes found out."""

    async def advise(self, query: str) -> Advice: ...


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One episode that is over. `query`: its task in words; `ending`: what it saw last.

    `scores`: the environment's before the first turn and after each. Both these and the transcript
    are empty where nobody wants them.
    """

    trajectory: Trajectory
    transcript: Transcript
    query: str
    ending: str
    scores: list[float]


Deliver = Callable[[Finished], None]


class EpisodeLate(Exception):
    """An episode missed its deadline, and most of its time was the policy's."""

    kind: FailureKind = "late"

    def __init__(self, failure: EnvironmentFailure) -> None:
        super().__init__(str(failure))
        self.name = failure.name
        self.error = failure.error


class EpisodePolicy(Protocol):
    """Whoever writes the ACTION tokens of one episode."""

    kind: Literal["learned", "scripted"]

    async def advise(self, world: TimedEnvironment, query: str) -> Advice:
        """What guides an episode of the task that `query` describes."""
        ...

    async def write(self, world: TimedEnvironment, context: list[int], turn: int) -> Generation:
        """The turn that follows `context`. A scripted policy has no `weights` and log-probs 0."""
        ...

    def close(self) -> None: ...


class Episode:
    """One member's way through its task."""

    def __init__(
        self,
        world: TimedEnvironment,
        ticket: Ticket,
        member: int,
        setting: Setting,
        progress: TicketProgress,
    ) -> None:
        self.world = world
        self.ticket = ticket
        self.member = member
        self.setting = setting
        self.progress = progress
        self.conversation: Conversation
        self.tools: frozenset[str] | None = None  # None: actions are no calls
        self.observation = ""
        self.query = ""
        self.advice = Advice()
        self.turns: list[Turn] = []
        self.scores: list[float] = []
        self.rewards: list[float] = []
        self.flags: list[TurnFlag] = []
        self.steps = 0
        self.success = self.terminated = self.truncated = False
        self.generate_s = 0.0

    async def play(self, policy: EpisodePolicy) -> Trajectory:
        """Reset, then turns until the end, a limit, or too little room for a whole one."""
        setting = self.setting
        loop = asyncio.get_running_loop()
        began = loop.time()
        room = setting.max_length - self.ticket.sampling.max_tokens
        await self._begin(policy, room)
        for turn in range(setting.max_turns):
            asked = loop.time()
            try:
                with self.progress.during(self.member, f"generation of turn {turn}"):
                    generation = await policy.write(self.world, self.conversation.tokens, turn)
            finally:
                self.generate_s += loop.time() - asked
            self.progress.count += len(generation.tokens)
            self.conversation.write(generation, turn)
            told = await self._turn(setting.chat.text_of(generation.tokens))
            if self.terminated or self.truncated or turn == setting.max_turns - 1:
                break
            unread = sum(bool(flag & TurnFlag.FORMAT_ERROR) for flag in self.flags)
            if 0 < setting.format_errors <= unread or not self.conversation.tell(told):
                break
        if not (self.terminated or self.truncated) and isinstance(self.world.env, Concluding):
            reward, self.success = await self.world.call("verdict", self.world.env.verdict)
            self.rewards[-1] += self._finite("verdict", reward)
        if not self.terminated:
            self.rewards[-1] += setting.truncated_reward
        return self._trajectory(policy.kind, loop.time() - began)

    async def _begin(self, policy: EpisodePolicy, room: int) -> None:
        """Reset, and the tokens up to the first turn, experience among them."""
        loop = asyncio.get_running_loop()
        began, world, task = loop.time(), self.world, self.ticket.task
        await world.open()
        dynamics_seed = key(self.ticket.dynamics_seed, self.member)
        seen = await world.call("reset", world.env.reset, task, dynamics_seed)
        self.observation = encodable(seen)
        self.query = f"{task.query}\n{self.observation}" if task.query else self.observation
        system = await world.call("instructions", system_message, self.setting, world.env)
        if self.setting.format.tools:
            self.tools = await world.call("tools", tool_names, world.env)
        talk = Conversation(self.setting, system, task.query, self.observation, room)
        self.conversation, length = talk, len(talk.tokens)
        if length > room:
            cause = f"first prompt of {length} tokens leaves no turn in policy.max_length"
            raise world.failure("first prompt", loop.time() - began, ValueError(cause))
        if self.member in self.ticket.guided:
            with self.progress.during(self.member, "asking for experience"):
                self.advice = await policy.advise(world, self.query)
            text = self.advice.text
            if not text or not talk.guide(self.setting.chat.experience(text)):
                self.advice = Advice()
        await self._score()

    async def _turn(self, text: str) -> str:
        """Carry out what one turn says; returns what is told of it."""
        actions = self.setting.format.parse(text)
        if self.setting.recorded:
            env, seen = self.world.env, self.observation
            state = seen
            if isinstance(env, Located):
                state = await self.world.call("state", env.state)
            action = f" {SEPARATOR} ".join(one for one in actions or [] if isinstance(one, str))
            self.turns.append(Turn(observation=seen, state=state, action=action, text=text))
        shown = await self._act(actions)
        await self._score()
        return shown

    async def _score(self) -> None:
        if self.setting.scored and isinstance(self.world.env, Scored):
            self.scores.append(await self.world.call("score", self.world.env.score))

    async def _act(self, actions: list[str | InvalidCall] | None) -> str:
        """Carry out one turn's actions; returns what is told of it."""
        reward, outputs = 0.0, list[str]()
        flags = TurnFlag.FORMAT_ERROR if actions is None else TurnFlag(0)
        for action in actions or []:
            if isinstance(action, InvalidCall):
                flags |= TurnFlag.FORMAT_ERROR | TurnFlag.TOOL_ERROR
                outputs.append(action.complaint)
                continue
            if (unknown := self._unknown(action)) is not None:
                flags |= TurnFlag.TOOL_ERROR
                outputs.append(unknown)
                continue
            step: Step = await self.world.call(
                "step", self.world.env.step, action, latency_s=self._latency_s()
            )
            self.steps += 1
            self.progress.count += 1
            outputs.append(encodable(step.observation))
            reward += self._finite("step", step.reward)
            flags |= TurnFlag(0) if step.info.valid else TurnFlag.FORMAT_ERROR
            flags |= TurnFlag.TOOL_ERROR if step.info.tool_error else TurnFlag(0)
            self.success = step.info.success
            self.terminated, self.truncated = step.terminated, step.truncated
            if step.terminated or step.truncated:
                break
        valid = not flags & TurnFlag.FORMAT_ERROR
        self.rewards.append(reward + (0.0 if valid else self.setting.format_penalty))
        self.flags.append(flags)
        told = self.setting.format.shown(outputs, valid, self.observation)
        if outputs:
            self.observation = outputs[-1] if self.tools is None else "\n".join(outputs)
        return told

    def _finite(self, doing: str, reward: float) -> float:
        """A reward; EnvironmentFailure where it is none that can be learnt from."""
        if not math.isfinite(reward):
            raise self.world.failure(doing, 0.0, ValueError(f"a reward of {reward}"))
        return reward

    def _unknown(self, action: str) -> str | None:
        """What is told of a call of a tool that does not exist; None where it does."""
        if self.tools is None:
            return None
        name, known = called(action).name, ", ".join(sorted(self.tools))
        known_or_answer = name in self.tools or name == ANSWER_TOOL
        return None if known_or_answer else f"error: no tool {name!r} (known: {known})"

    def late(self) -> EnvironmentFailure | EpisodeLate:
        """Whose fault it is that the deadline was missed: a slow engine or endpoint makes no task
        bad. Demonstrations are the environment's own."""
        doing, seconds = self.progress.last[self.member]
        limit_s = self.setting.episode_timeout_s
        cause = f"env.episode_timeout_s is {limit_s:g}, {self.generate_s:.1f} s were the policy's"
        failure = self.world.failure(doing, seconds, TimeoutError(cause))
        slow_policy = self.ticket.kind not in SCRIPTED and self.generate_s > limit_s / 2
        return EpisodeLate(failure) if slow_policy else failure

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
            sequences=self.conversation.sequences(),
            reward=math.fsum(self.rewards),
            success=self.success,
            terminated=self.terminated,
            truncated=not self.terminated,
            turn_rewards=np.array(self.rewards, np.float32),
            turn_flags=np.array(self.flags, np.uint8),
            labels=np.zeros(turns, np.int8),
            label_source="",
            experience_ids=list(self.advice.ids),
            policy=kind,
            timing={
                "env_s": self.world.spent_s,
                "generate_s": self.generate_s,
                "total_s": total_s,
            },
        )


async def run_episode(
    ticket: Ticket, member: int, setting: Setting, policy: EpisodePolicy, progress: TicketProgress
) -> Finished:
    """Run one member.

    EnvironmentFailure where its environment raised or missed a deadline, EpisodeLate where the
    whole episode did because of the policy.
    """
    world = TimedEnvironment(ticket, member, setting.step_timeout_s, progress)
    episode = Episode(world, ticket, member, setting, progress)
    try:
        async with asyncio.timeout(setting.episode_timeout_s) as limit:
            trajectory = await episode.play(policy)
    except TimeoutError:
        world.abandon()
        if limit.expired():
            raise episode.late() from None
        raise
    except BaseException:
        world.abandon()
        raise
    finally:
        policy.close()
    await world.close()
    transcript = Transcript(
        trajectory_id=trajectory.trajectory_id,
        reward=trajectory.reward,
        success=trajectory.success,
        experience_ids=trajectory.experience_ids,
        turns=episode.turns,
    )
    return Finished(
        trajectory=trajectory,
        transcript=transcript,
        query=episode.query,
        ending=episode.observation,
        scores=episode.scores,
    )
