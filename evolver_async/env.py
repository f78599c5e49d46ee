"""Values that every environment returns, for environments of one's own too.

The protocol that environments follow stands in `actors/envs/base.py`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Info(NamedTuple):
    """Facts about one step. `valid`: the action existed; `success`: the task is solved;
    `tool_error`: a tool was called and failed.

    `metrics`: numbers of the environment's own by name, up to 32 in an episode. The last value of
    each name counts; the mean over the episodes that have it is the metric `env/<name>`.
    """

    valid: bool = True
    success: bool = False
    tool_error: bool = False
    metrics: Mapping[str, float] = MappingProxyType({})


class Step(NamedTuple):
    """Result of one action. `observation` is the text of the next user message; the last one is not
    sent to the policy, but a world model learns it and a grader reads it."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Info


class Exact(NamedTuple):
    """Computed success probabilities of the uniform random and of the optimal policy, and their
    returns if rewards say more than success; the optimal policy may then be another."""

    random: float
    optimal: float
    random_return: float | None = None
    optimal_return: float | None = None
