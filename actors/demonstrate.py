"""Scripted episodes for the supervised stages: an expert's or a random player's actions, in tokens.

The same form as learned episodes, except that nothing was sampled: log-probs are 0 and no weights
are named.
"""

import random
from collections.abc import Awaitable, Callable
from typing import Literal

from actors.engines.base import Generation
from actors.envs.base import Env, Solvable
from actors.progress import Progress
from actors.rollout import Policy, Setting, run_members
from actors.world import World
from evolver_async.schema import Ticket, Trajectory, key


class Scripted:
    """Plays one whole episode as the expert, or uniformly at random; which, is drawn once."""

    kind: Literal["learned", "scripted"] = "scripted"

    def __init__(
        self, ticket: Ticket, member: int, setting: Setting, expert_fraction: float
    ) -> None:
        parts = ("script", ticket.group_id, member, ticket.attempt)
        self._rng = random.Random(key(setting.seed, *parts))
        self.expert = self._rng.random() < expert_fraction
        self._chat = setting.chat
        self._format = setting.format

    async def write(self, world: World, context: list[int], turn: int) -> Generation:
        text = await world.call("demonstration", self._answer, world.env)
        tokens = self._chat.tokens_of(text)
        return Generation(tokens=tokens, logprobs=[0.0] * len(tokens), weights=[], finish="stop")

    def _answer(self, env: Env) -> str:
        """The text of a turn; its failures are the environment's, because all of it comes there."""
        assert isinstance(env, Solvable), f"{type(env).__name__} cannot demonstrate"
        count = self._format.actions_per_turn
        actions = env.solve()[:count] if self.expert else self._rng.choices(env.actions(), k=count)
        return self._format.render_actions(actions)

    def close(self) -> None:
        pass


async def demonstrate_group(
    ticket: Ticket,
    setting: Setting,
    expert_fraction: float,
    progress: Progress,
    deliver: Callable[[Trajectory], Awaitable[None]],
) -> None:
    """Run a demo ticket's members by script; see `run_members`."""

    def policy_of(member: int) -> Policy:
        return Scripted(ticket, member, setting, expert_fraction)

    await run_members(ticket, setting, policy_of, progress, deliver)
