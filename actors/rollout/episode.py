"""One episode: environment, policy and conversation take turns.

Tokens are recorded as the model saw them, a Sequence for every context (see `conversation.py`):
PROMPT up to where it first writes, EXPERIENCE within it, ACTION for what it sampled, OBSERVATION
for everything between. Times are the loop's, so they are virtual in a serial run.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.engines.engine import Generation
from actors.envs.base import (
    Bounded,
    Concluding,
    EnvironmentFailure,
    Identified,
    Scored,
)
from actors.formats.chat import encodable
from actors.formats.tool_calls import ANSWER_TOOL, InvalidCall, called
from actors.formats.turns import SEPARATOR
from actors.rollout.conversation import (
    Conversation,
    plain_instructions,
    system_message,
    with_tools,
)
from actors.rollout.environment import TimedEnvironment
from actors.rollout.episode_config import Setting, reads_scores, step_latency_s
from actors.rollout.episode_policy import EpisodePolicy
from actors.rollout.finished import Finished, RewardTooLarge, assembled
from actors.ticket_progress import TicketProgress
from evolver_async.extension import RAISED
from evolver_async.metrics.activity import GENERATING
from evolver_async.randomness import key
from evolver_async.schema import FAILED_CALL, SCRIPTED, Task, Ticket, TurnFlag
from evolver_async.wire.failure_totals import FailureKind
from evolver_async.wire.transcripts import Turn

MAX_METRICS = 32  # numbers of the environment's own in one episode
HUNG_S = 3600.0  # beyond the episode's limit: a turn that is still being written never returns

log = logging.getLogger(__name__)


class EpisodeLate(Exception):
    """An episode whose policy does not answer."""

    kind: FailureKind = "late"

    def __init__(self, failure: EnvironmentFailure) -> None:
        super().__init__(str(failure))
        self.name, self.error = failure.name, failure.error


@dataclass(eq=False)
class Episode:
    """Run of one member's episode."""

    environment: TimedEnvironment
    ticket: Ticket
    member: int
    setting: Setting
    progress: TicketProgress
    conversation: Conversation = field(init=False)
    specs: list[dict[str, Any]] = field(default_factory=list)  # of the tools
    tools: frozenset[str] | None = None  # None: actions are no calls
    observation: str = ""
    query: str = ""
    content: str = ""
    instructions: str = ""
    experience_ids: dict[int, None] = field(default_factory=dict)  # of the entries shown, in order
    turns: list[Turn] = field(default_factory=list)
    acted: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    flags: list[TurnFlag] = field(default_factory=list)
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    success: bool = False
    terminated: bool = False
    truncated: bool = False
    generate_s: float = 0.0

    async def play(self, policy: EpisodePolicy) -> Finished:
        """Reset, then run turns until the end, a limit, or too little room for a whole turn.

        The limit of time counts from the first observation, as a process for the environment can
        take long to start, and ends the episode after the turn in which it passes. Tokens that were
        sampled are never thrown away for it: played again until it is short, a task would teach
        short episodes alone.
        """
        setting, loop = self.setting, asyncio.get_running_loop()
        began = loop.time()
        room = setting.max_length - self.ticket.sampling.max_tokens
        await self._begin(policy, room)
        observed = loop.time()
        env = self.environment.env
        alone = setting.server is None  # else turns that call its tools come before the last one
        bound = env.max_turns if isinstance(env, Bounded) and alone else None
        turns = min(setting.max_turns, bound or setting.max_turns)
        for turn in range(turns):
            asked = loop.time()
            self.progress.generating += 1
            try:
                generating = self.progress.clock.during(GENERATING)
                doing = f"generation of turn {turn}"
                with generating, self.progress.during(self.member, doing, shared=True):
                    generation = await self._written(policy, turn)
            finally:
                self.progress.generating -= 1
                self.generate_s += loop.time() - asked
            self.progress.count += len(generation.tokens)
            self.conversation.write(generation, turn)
            told = await self._turn(setting.chat.text_of(generation.tokens))
            if policy.kind == "learned" and generation.finish == "length":
                self.flags[-1] |= TurnFlag.CUT
            if self.terminated or self.truncated:
                break
            if turn == turns - 1:
                self.terminated = turns == bound  # the environment's own end
                break
            unread = sum(bool(flag & TurnFlag.FORMAT_ERROR) for flag in self.flags)
            if loop.time() - observed >= setting.episode_timeout_s:
                self.flags[-1] |= TurnFlag.LATE
                break
            if 0 < setting.format_errors <= unread or not self.conversation.tell(told):
                break
            if setting.stepwise:
                await self._guide(policy, f"{self.query}\n{self.observation}")
        if self.conversation.full:
            self.flags[-1] |= TurnFlag.FULL
        if not (self.terminated or self.truncated) and isinstance(self.environment.env, Concluding):
            verdict = self.environment.env.verdict
            reward, self.success = await self.environment.verdict(verdict)
            self.rewards[-1] += self._finite("verdict", reward)
        if not self.terminated:
            self.rewards[-1] += setting.truncated_reward
        try:
            return self._assembled(policy, loop.time() - began)
        except RewardTooLarge as error:
            raise self.environment.failure("rewards", 0.0, error) from None

    async def _written(self, policy: EpisodePolicy, turn: int) -> Generation:
        """Have a turn written. A policy that does not answer is no failure of the task, but
        demonstrations are the environment's own."""
        limit_s = self.setting.episode_timeout_s + HUNG_S
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await policy.write(self.environment, self.conversation.tokens, turn)
        except TimeoutError as error:
            if not limit.expired():
                raise
            cause = TimeoutError(f"it wrote for {limit_s:g} s")
            failure = self.environment.failure(f"generation of turn {turn}", limit_s, cause)
            raise (failure if self.ticket.kind in SCRIPTED else EpisodeLate(failure)) from error

    def _assembled(self, policy: EpisodePolicy, total_s: float) -> Finished:
        return assembled(
            *(self.ticket, self.member, self.setting, policy.kind),
            self.conversation.sequences(),
            rewards=self.rewards,
            flags=self.flags,
            outcome=(self.success, self.terminated),
            seconds=(self.environment.spent_s, self.generate_s, total_s),
            experience_ids=list(self.experience_ids),
            turns=self.turns,
            query=self.query,
            content=self.content,
            instructions=self.instructions,
            ending=self.observation,
            acted=self.acted,
            tools=self.specs,
            scores=self.scores,
            metrics=self.metrics,
        )

    async def _begin(self, policy: EpisodePolicy, room: int) -> None:
        """Reset and make the tokens up to the first turn, experience included."""
        loop = asyncio.get_running_loop()
        began, environment, task = loop.time(), self.environment, self.ticket.task
        await environment.open()
        dynamics_seed = key(self.ticket.dynamics_seed, self.member)
        opening = await environment.reset(task, dynamics_seed)
        self.observation = encodable(opening.text)
        self.query = query_of(task, self.observation)
        self.content = self.query
        if isinstance(environment.env, Identified):
            told = await environment.text("content", environment.env.content)
            self.content = f"{task.query}\n{told}"
        specs = await environment.tools(self.setting.format)
        described = system_message, self.setting, environment.env, specs
        system = await environment.call("instructions", *described)
        if self.setting.recorded:
            worded = plain_instructions, environment.env
            self.instructions = await environment.call("instructions", *worded)
        if self.setting.format.tools:
            self.specs, self.tools = specs, frozenset(spec["name"] for spec in specs)
            self.setting = with_tools(self.setting, specs)
        withheld = self.setting.withholds and self.ticket.kind == "rollout"
        talk = Conversation(self.setting, system, task.query, opening, room, withheld=withheld)
        self.conversation, length = talk, len(talk.tokens)
        if length > room:
            cause = f"first prompt of {length} tokens leaves no turn in policy.max_length"
            raise environment.failure("first prompt", loop.time() - began, ValueError(cause))
        await self._guide(policy, self.query)
        await self._score()

    async def _guide(self, policy: EpisodePolicy, query: str) -> None:
        """Show a guided member what helps with `query`; drop and count it if it leaves no room for
        a turn. Entries that are withheld are not used."""
        if self.member not in self.ticket.guided:
            return
        with self.progress.during(self.member, "asking for experience"):
            state = await self.environment.state(self.observation) if self.setting.stepwise else ""
            advice = await policy.advise(self.environment, query, state)
        if not advice.text:
            return
        guidance = self.setting.chat.experience(advice.text)
        if not self.conversation.guide(guidance):
            limit = f"{self.setting.max_length} tokens of policy.max_length"
            cause = f"guidance of {len(guidance)} tokens leaves no room for a turn in {limit}"
            self.setting.failures.note("experience", "guidance", cause)
            policy.count_unguided()
        elif not self.conversation.withheld:
            self.experience_ids |= dict.fromkeys(advice.ids)

    async def _turn(self, text: str) -> str:
        """Carry out one turn; return the text that the policy reads after it."""
        try:
            actions = self.setting.format.parse(text)
        except RAISED as error:  # of a format or of `rollout.extract`, a user's own
            raise self.environment.failure("reading a turn", 0.0, error) from error
        if self.setting.recorded:
            seen, state = self.observation, await self.environment.state(self.observation)
            action = f" {SEPARATOR} ".join(one for one in actions or [] if isinstance(one, str))
            self.turns.append(Turn(observation=seen, state=state, action=action, text=text))
        shown = await self._act(actions)
        await self._score()
        return shown

    async def _score(self) -> None:
        env = self.environment.env
        if reads_scores(self.setting, self.ticket, self.member) and isinstance(env, Scored):
            self.scores.append(await self.environment.score(env.score))

    async def _act(self, actions: list[str | InvalidCall] | None) -> str:
        """Carry out one turn's actions; return the text that the policy reads after it."""
        setting, reward, outputs = self.setting, 0.0, list[str]()
        flags = TurnFlag.FORMAT_ERROR if actions is None else TurnFlag(0)
        for action in actions or []:
            if isinstance(action, InvalidCall):
                flags |= TurnFlag.FORMAT_ERROR | FAILED_CALL
                outputs.append(action.complaint)
                continue
            if (unknown := self._unknown(action)) is not None:
                flags |= FAILED_CALL
                outputs.append(unknown)
                continue
            latency_s = step_latency_s(setting, self.ticket, self.member, self.steps)
            step = await self.environment.step(action, latency_s)
            self.steps += 1
            if setting.recorded:
                self.acted.append(action)
            self.progress.count += 1
            seen, cut = setting.chat.shortened(
                encodable(step.observation), setting.max_observation_tokens
            )
            outputs.append(seen)
            flags |= TurnFlag.OBSERVATION_CUT if cut else TurnFlag(0)
            self._note(step.info.metrics)
            reward += self._finite("step", step.reward)
            if self.tools is not None and called(action).name != ANSWER_TOOL:
                flags |= TurnFlag.TOOL_CALL
            flags |= TurnFlag(0) if step.info.valid else TurnFlag.INVALID_ACTION
            flags |= FAILED_CALL if step.info.tool_error else TurnFlag(0)
            self.success = step.info.success
            self.terminated, self.truncated = step.terminated, step.truncated
            if step.terminated or step.truncated:
                break
        valid = not flags & (TurnFlag.FORMAT_ERROR | TurnFlag.INVALID_ACTION)
        self.rewards.append(reward + (0.0 if valid else setting.format_penalty))
        self.flags.append(flags)
        over = self.terminated or self.truncated  # the policy reads nothing after its last turn
        told = "" if over else setting.format.shown(outputs, valid, self.observation)
        if outputs:
            self.observation = outputs[-1] if self.tools is None else "\n".join(outputs)
        return told

    def _note(self, metrics: Mapping[str, float]) -> None:
        """Note numbers of the environment's own; EnvironmentFailure for too many names."""
        self.metrics |= metrics
        if len(self.metrics) > MAX_METRICS:
            error = ValueError(f"more than {MAX_METRICS} names in the metrics of an episode")
            raise self.environment.failure("step", 0.0, error)

    def _finite(self, doing: str, reward: float) -> float:
        """Return a finite reward; EnvironmentFailure for another."""
        if not math.isfinite(reward):
            raise self.environment.failure(doing, 0.0, ValueError(f"a reward of {reward}"))
        return reward

    def _unknown(self, action: str) -> str | None:
        """Return the error for a call of an unknown tool; None for a known one."""
        if self.tools is None:
            return None
        name, known = called(action).name, ", ".join(sorted(self.tools))
        known_or_answer = name in self.tools or name == ANSWER_TOOL
        return None if known_or_answer else f"error: no tool {name!r} (known: {known})"


def query_of(task: Task, observed: str) -> str:
    """Return the text by which experience is found for a task that begins with an observation."""
    return f"{task.query}\n{observed}" if task.query else observed


async def run_episode(
    ticket: Ticket, member: int, setting: Setting, policy: EpisodePolicy, progress: TicketProgress
) -> Finished:
    """Run one member.

    EnvironmentFailure if its environment raised or a call of it did not return, EpisodeLate if the
    policy did not answer.
    """
    shared = setting.failures, setting.idle, setting.isolation, setting.server
    environment = TimedEnvironment(ticket, member, setting.step_timeout_s, progress, *shared)
    episode = Episode(environment, ticket, member, setting, progress)
    async with environment:
        with contextlib.closing(policy):
            return await episode.play(policy)
