"""What an agent is, how one is found by import path, and what it may return.

An agent is `async def agent(*, base_url, api_key, task, seed)`. It talks to `base_url` as to
OpenAI's, has its tools and surroundings in its own hands, and returns what it earned.
"""

import importlib
import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """What an agent earned, and whether it did what the task asks for."""

    reward: float
    success: bool


Agent = Callable[..., Awaitable[Outcome | float | None]]


def load_agent(path: str) -> Agent:
    """The agent of an import path; ValueError names `rollout.agent`."""
    module, separator, attribute = path.partition(":")
    if not separator:
        raise ValueError(f"rollout.agent: {path!r} is no package.module:function")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs whatever the module does
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"rollout.agent: cannot import {path!r}: {said}") from error
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"rollout.agent: {path!r} is no async function")
    try:
        inspect.signature(found).bind(base_url="", api_key="", task=None, seed=0)
    except TypeError as error:
        wanted = "the keywords base_url, api_key, task and seed"
        raise ValueError(f"rollout.agent: {path!r} does not take {wanted}: {error}") from None
    return found


def outcome_of(returned: object) -> Outcome:
    """What a returned value says; a number of at least 1 is a success. Raises ValueError."""
    if isinstance(returned, Outcome):
        outcome = returned
    elif isinstance(returned, int | float):
        outcome = Outcome(float(returned), returned >= 1)
    else:
        kind = type(returned).__name__
        raise ValueError(f"it returned {kind}, and rollout.agent_reward is returned")
    if not math.isfinite(outcome.reward):
        raise ValueError(f"it returned the reward {outcome.reward}")
    return outcome
