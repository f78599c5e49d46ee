"""Import of an agent by its path, and the values that it can return.

An agent is `async def agent(*, base_url, api_key, task, seed)`. It calls `base_url` as it would
call OpenAI's, runs its own tools and environment, and returns its reward. In an episode of several
players that is a reward for each of them by name, or one for all.
"""

import importlib
import inspect
import math
import statistics
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from actors.envs.return_checks import checked_metrics, number, truth
from evolver_async.extension import RAISED
from evolver_async.schema import Player


class AgentOutcome(NamedTuple):
    """Reward of an agent, or of each of its players by name. `success`: True if it solved the task;
    `metrics`: numbers of its own by name, as in `Info`."""

    reward: float | Mapping[str, float]
    success: bool
    metrics: Mapping[str, float] = MappingProxyType({})


Agent = Callable[..., Awaitable[AgentOutcome | float | Mapping[str, float] | None]]


def load_agent(path: str) -> Agent:
    """Import an agent. Raise ValueError, which names `rollout.agent`."""
    module, separator, attribute = path.partition(":")
    if not separator:
        raise ValueError(f"rollout.agent: {path!r} is not of the form package.module:function")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except RAISED as error:  # the module's own code runs, which can raise anything
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"rollout.agent: cannot import {path!r}: {problem}") from error
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"rollout.agent: {path!r} is not an async function")
    try:
        inspect.signature(found).bind(base_url="", api_key="", task=None, seed=0)
    except TypeError as error:
        wanted = "the keywords base_url, api_key, task and seed"
        raise ValueError(f"rollout.agent: {path!r} does not take {wanted}: {error}") from None
    return found


def outcome_of(returned: object, players: Collection[str] = ()) -> AgentOutcome:
    """Convert an agent's return value; a number of at least 1 is a success, and so is such a mean
    over the players. `players`: those that can have a reward. Raise ValueError."""
    if isinstance(returned, AgentOutcome):
        try:
            reward = _reward("reward of the AgentOutcome", returned.reward, players)
            success = truth("success of the AgentOutcome", returned.success)
            metrics = checked_metrics("metrics of the AgentOutcome", returned.metrics)
            outcome = AgentOutcome(reward, success, metrics)
        except TypeError as error:
            raise ValueError(str(error)) from None
    elif isinstance(returned, Real):
        reward = float(returned)
        outcome = AgentOutcome(reward, reward >= 1)
    elif isinstance(returned, Mapping):
        rewards = _rewards("the returned rewards", returned, players)
        outcome = AgentOutcome(rewards, statistics.fmean(rewards.values()) >= 1)
    else:
        kind = type(returned).__name__
        raise ValueError(f"it returned {kind}; rollout.agent_reward=returned needs a number")
    rewards = outcome.reward if isinstance(outcome.reward, Mapping) else {"": outcome.reward}
    for name, reward in rewards.items():
        if not math.isfinite(reward):
            raise ValueError(f"it returned the reward {reward}{name and f' of {name}'}")
    return outcome


def require_rewards(outcome: AgentOutcome, moved: Collection[str]) -> None:
    """Raise ValueError if a player that has moved has no reward. `moved`: that of each turn."""
    if isinstance(outcome.reward, Mapping):
        lacking = sorted(set(moved) - outcome.reward.keys())
        if lacking:
            raise ValueError(f"it returned no reward of {', '.join(lacking)}")


def _reward(
    name: str, value: float | Mapping[str, float], players: Collection[str]
) -> float | dict[str, float]:
    return _rewards(name, value, players) if isinstance(value, Mapping) else number(name, value)


def _rewards(name: str, value: Mapping[str, float], players: Collection[str]) -> dict[str, float]:
    if not players:
        raise ValueError(f"{name} are of players, and rollout.players is empty")
    if not value or not value.keys() <= set(players):
        known = ", ".join(players)
        raise ValueError(f"{name} are of {', '.join(map(str, value))}; rollout.players: {known}")
    try:
        return {player: number(f"{name}: {player}", one) for player, one in value.items()}
    except TypeError as error:
        raise ValueError(str(error)) from None


def paid(
    outcome: AgentOutcome,
    players: Sequence[str],
    moved: Sequence[str],
    rewards: np.ndarray,
    bonus: float,
) -> list[Player]:
    """Add the outcome and `bonus` to the last turn of every player in `rewards`, float32[K].

    `moved`: the player of each turn. Return the players that have turns or a reward of their own;
    none if there is one player.
    """
    if not players:
        assert not isinstance(outcome.reward, Mapping), "outcome_of refuses rewards of players"
        rewards[-1] += outcome.reward + bonus
        return []
    found = []
    for name in players:
        turns = [turn for turn, mover in enumerate(moved) if mover == name]
        reward, success = outcome.reward, outcome.success
        if isinstance(reward, Mapping):
            if name not in reward:
                continue
            reward = float(reward[name])
            success = reward >= 1
        elif not turns:
            continue
        if turns:
            rewards[turns[-1]] += reward + bonus
            reward = math.fsum(rewards[turns].tolist())
        found.append(Player(name=name, reward=float(reward), success=success, turns=turns))
    return found
