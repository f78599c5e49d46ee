"""Scripted episodes for the supervised stages: tokens of an expert's or a random player's actions.

The same form as learned episodes, except that nothing was sampled: log-probs are 0 and no weights
are named.
"""

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import msgspec

from actors.engines.engine import Generation
from actors.envs.base import Env, Located, Rewindable, Solvable, make_env
from actors.experience.state_keys import state_key
from actors.experience.templates import contrast
from actors.llm.quoting import quoted_lines
from actors.rollout.environment import TimedEnvironment
from actors.rollout.episode_config import Setting
from actors.rollout.episode_policy import Advice, EpisodePolicy
from actors.rollout.finished import Deliver
from actors.rollout.group import run_members
from actors.ticket_progress import TicketProgress
from evolver_async.randomness import key
from evolver_async.schema import Ticket

TOLD = 0.8  # of the states on the way, about
DRAWS = 8  # until a random turn fits into rollout.max_tokens
OTHER_TASKS = 2  # with hints among the own ones: the policy must match the state, not the order


class ScriptedPolicy(EpisodePolicy):
    """Policy that plays one whole episode as the expert or uniformly at random, drawn once. The
    expert's actions are those of the task's `reference`, else the environment's solution.

    A guided one is told what to do in some states, in the words of experience, and does it there.
    """

    kind: Literal["learned", "scripted"] = "scripted"

    def __init__(
        self, ticket: Ticket, member: int, setting: Setting, expert_fraction: float
    ) -> None:
        parts = ("script", ticket.group_id, member, ticket.attempt)
        self._rng = random.Random(key(setting.seed, *parts))
        self.expert = self._rng.random() < expert_fraction
        self._task = ticket.task
        self._written = 0  # actions of the turns before
        self._hints: dict[str, str] = {}
        self._chat = setting.chat
        self._format = setting.format
        self._most = setting.hints
        self._max_chars = setting.hint_chars
        self._stepwise = setting.stepwise
        self._max_tokens = ticket.sampling.max_tokens

    async def advise(self, world: TimedEnvironment, query: str, state: str) -> Advice:
        assert isinstance(world.env, Rewindable), f"{type(world.env).__name__} cannot be guided"
        text = await world.call("hints", self._hint, world.env)
        return Advice(text=text)

    def count_unguided(self) -> None:
        """Follow no hint, as none fits into the context."""
        self._hints = {}

    def _hint(self, env: Rewindable) -> str:
        """Return the states of a random walk as experience, each with its move and one to avoid,
        among states of other tasks; only those that fit are followed. For a turn by itself, which
        is shown entries of its own state, the walk has one step and there are no others.

        Drawn at random, so that what is learned is to follow, and no move in particular.
        """
        states = self._walk(env, 1 if self._stepwise else self._most)
        told = [state for state in states if self._rng.random() < TOLD]
        if self._stepwise:
            return self._told(told, states)
        told = told or list(states)[:1]
        foreign = {state: moves for state, moves in self._others() if state not in states}
        room = max(0, min(self._most - len(told), len(foreign)))
        told += self._rng.sample(list(foreign), room)
        self._rng.shuffle(told)
        return self._told(told, states | foreign)

    def _told(self, told: list[str], states: dict[str, tuple[str, str]]) -> str:
        """Write hints for states; note those that fit, to be followed."""
        texts = {
            state: contrast(state_key(state), *states[state], self._max_chars) for state in told
        }
        told = [state for state in told if texts[state]]  # "" if not even the moves fit
        lines = quoted_lines([texts[state] for state in told], self._max_chars)
        self._hints = {told[place]: states[told[place]][0] for place in lines}
        return "\n".join(lines.values())

    def _walk(self, env: Rewindable, most: int) -> dict[str, tuple[str, str]]:
        """Return two moves, the one made and another, by state of a random walk from here."""
        start, states = env.snapshot(), dict[str, tuple[str, str]]()
        while len(states) < most and env.state() not in states:
            moves = env.actions()
            if len(moves) < 2:
                break
            good, bad = self._rng.sample(moves, 2)
            states[env.state()] = good, bad
            step = env.step(good)
            if step.terminated or step.truncated:
                break
        env.restore(start)
        return states

    def _others(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield the walks of other tasks; none for a synthetic task, whose goal is of its own map.

        Their numbers are at most the own one, so that they exist if it does.
        """
        task = self._task
        if task.origin == "synthetic":
            return
        for drawn in self._rng.sample(range(max(task.map_seed, OTHER_TASKS)), OTHER_TASKS):
            number = drawn + (drawn >= task.map_seed)
            env = make_env(task.env, task.params)
            with contextlib.closing(env):
                env.reset(msgspec.structs.replace(task, map_seed=number), number)
                assert isinstance(env, Rewindable)
                yield from self._walk(env, self._most).items()

    async def write(self, world: TimedEnvironment, context: list[int], turn: int) -> Generation:
        tokens: list[int] = []
        for _ in range(DRAWS):
            text = await world.call("demonstration", self._answer, world.env)
            tokens = self._chat.turn(text, self._format.stop_strings)
            if len(tokens) <= self._max_tokens or self.expert:
                break
        if len(tokens) > self._max_tokens:
            cause = f"a turn of {len(tokens)} tokens: rollout.max_tokens is {self._max_tokens}"
            raise world.failure("demonstration", 0.0, ValueError(cause))
        return Generation(tokens=tokens, logprobs=[0.0] * len(tokens), weights=[], finish="stop")

    def _answer(self, env: Env) -> str:
        """Return the text of a turn. Its errors count as the environment's, which provides the
        actions."""
        count = self._format.actions_per_turn
        if self.expert and self._task.reference:
            actions = self._task.reference[self._written :][:count]
            self._written += len(actions)
            return self._format.render_actions(actions)
        assert isinstance(env, Solvable), f"{type(env).__name__} cannot demonstrate"
        hint = self._hints.get(env.state()) if isinstance(env, Located) else None
        if hint is not None and hint in env.actions():
            actions = [hint]
        elif self.expert:
            actions = env.solve()[:count]
        else:
            actions = self._rng.choices(env.actions(), k=count)
        return self._format.render_actions(actions)


def within_reference(ticket: Ticket, setting: Setting) -> Setting:
    """Return the settings of an episode that has no more turns than its task's reference."""
    if not ticket.task.reference:
        return setting
    turns = math.ceil(len(ticket.task.reference) / setting.format.actions_per_turn)
    return replace(setting, max_turns=min(setting.max_turns, turns))


async def demonstrate_group(
    ticket: Ticket,
    setting: Setting,
    expert_fraction: float,
    progress: TicketProgress,
    deliver: Deliver,
) -> None:
    """Run a demo ticket's members by script; see `run_members`. An episode of a reference ends with
    it."""
    setting = within_reference(ticket, setting)

    def policy_of(member: int) -> EpisodePolicy:
        return ScriptedPolicy(ticket, member, setting, expert_fraction)

    await run_members(ticket, setting, policy_of, progress, deliver)
