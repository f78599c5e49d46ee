"""Import of an agent by its path, and the values that it can return.

An agent is `async def agent(*, base_url, api_key, task, seed)`. It calls `base_url` as it would
call OpenAI's, runs its own tools and environment, and returns its reward.
"""

import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from types import MappingProxyType
from typing import NamedTuple

from actors.envs.results import checked_metrics, number, truth
from evolver_async.extension import RAISED


class AgentOutcome(NamedTuple):
    """Reward of an agent. `success`: True if it solved the task; `metrics`: numbers of its own by
    name, as in `Info`."""

    reward: float
    success: bool
    metrics: Mapping[str, float] = MappingProxyType({})


Agent = Callable[..., Awaitable[AgentOutcome | float | None]]


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


def outcome_of(returned: object) -> AgentOutcome:
    """Convert an agent's return value; a number of at least 1 is a success. Raise ValueError."""
    if isinstance(returned, AgentOutcome):
        try:
            reward = number("reward of the AgentOutcome", returned.reward)
            success = truth("success of the AgentOutcome", returned.success)
            metrics = checked_metrics("metrics of the AgentOutcome", returned.metrics)
            outcome = AgentOutcome(reward, success, metrics)
        except TypeError as error:
            raise ValueError(str(error)) from None
    elif isinstance(returned, Real):
        reward = float(returned)
        outcome = AgentOutcome(reward, reward >= 1)
    else:
        kind = type(returned).__name__
        raise ValueError(f"it returned {kind}; rollout.agent_reward=returned needs a number")
    if not math.isfinite(outcome.reward):
        raise ValueError(f"it returned the reward {outcome.reward}")
    return outcome
