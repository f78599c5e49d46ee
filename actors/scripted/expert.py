"""Scripted episodes for the supervised stages: tokens of an expert's or a random player's actions.

The same form as learned episodes, except that nothing was sampled: log-probs are 0 and no weights
are named.
"""

import random
from typing import Literal

from actors.engines.base import Generation
from actors.envs.base import Env, Located, Rewindable, Solvable
from actors.experience.templates import contrast
from actors.llm.quoting import quoted
from actors.progress import TicketProgress
from actors.rollout.environment import TimedEnvironment
from actors.rollout.episode_config import Setting
from actors.rollout.finished import Deliver
from actors.rollout.group import run_members
from actors.rollout.policy import Advice, EpisodePolicy
from evolver_async.randomness import key
from evolver_async.schema import Ticket

MOST_HINTS = 8
TOLD = 0.8  # of the states on the way, about


class ScriptedPolicy(EpisodePolicy):
    """Policy that plays one whole episode as the expert or uniformly at random, drawn once.

    A guided one is told what to do in some states, in the words of experience, and does it there.
    """

    kind: Literal["learned", "scripted"] = "scripted"

    def __init__(
        self, ticket: Ticket, member: int, setting: Setting, expert_fraction: float
    ) -> None:
        parts = ("script", ticket.group_id, member, ticket.attempt)
        self._rng = random.Random(key(setting.seed, *parts))
        self.expert = self._rng.random() < expert_fraction
        self._hints: dict[str, str] = {}
        self._chat = setting.chat
        self._format = setting.format

    async def advise(self, world: TimedEnvironment, query: str) -> Advice:
        assert isinstance(world.env, Rewindable), f"{type(world.env).__name__} cannot be guided"
        text = await world.call("hints", self._hint, world.env)
        return Advice(text=text)

    def _hint(self, env: Rewindable) -> str:
        """Return the states of a random walk as experience, each with its move and one to avoid.

        Drawn at random, so that what is learned is to follow, and no move in particular.
        """
        start, states = env.snapshot(), dict[str, tuple[str, str]]()
        while len(states) < MOST_HINTS and env.state() not in states:
            moves = env.actions()
            if len(moves) < 2:
                break
            good, bad = self._rng.sample(moves, 2)
            states[env.state()] = good, bad
            step = env.step(good)
            if step.terminated or step.truncated:
                break
        env.restore(start)
        told = [state for state in states if self._rng.random() < TOLD] or list(states)[:1]
        self._rng.shuffle(told)
        self._hints = {state: states[state][0] for state in told}
        return quoted([contrast(state, *states[state]) for state in told])

    async def write(self, world: TimedEnvironment, context: list[int], turn: int) -> Generation:
        text = await world.call("demonstration", self._answer, world.env)
        tokens = self._chat.turn(text, self._format.stop_strings)
        return Generation(tokens=tokens, logprobs=[0.0] * len(tokens), weights=[], finish="stop")

    def _answer(self, env: Env) -> str:
        """Return the text of a turn. Its errors count as the environment's, which provides the
        actions."""
        assert isinstance(env, Solvable), f"{type(env).__name__} cannot demonstrate"
        count = self._format.actions_per_turn
        hint = self._hints.get(env.state()) if isinstance(env, Located) else None
        if hint is not None:
            actions = [hint]
        elif self.expert:
            actions = env.solve()[:count]
        else:
            actions = self._rng.choices(env.actions(), k=count)
        return self._format.render_actions(actions)


async def demonstrate_group(
    ticket: Ticket,
    setting: Setting,
    expert_fraction: float,
    progress: TicketProgress,
    deliver: Deliver,
) -> None:
    """Run a demo ticket's members by script; see `run_members`."""

    def policy_of(member: int) -> EpisodePolicy:
        return ScriptedPolicy(ticket, member, setting, expert_fraction)

    await run_members(ticket, setting, policy_of, progress, deliver)
