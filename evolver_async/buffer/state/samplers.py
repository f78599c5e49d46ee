"""Samplers: the order in which ready groups are handed to the learner. Pure."""

import math
from collections.abc import Callable
from typing import Any

from evolver_async.buffer.state.groups import HeldGroup
from evolver_async.errors import Unrecoverable
from evolver_async.extension import implementation, is_own

# A rank from a ready group, its version lag and `buffer.params`: the smallest is taken first, and
# of equal ones the group that was ready first.
Sampler = Callable[[HeldGroup, int, dict[str, Any]], float]


def fifo(held: HeldGroup, lag: int, params: dict[str, Any]) -> float:
    """Rank all groups alike: the first that was ready is taken first."""
    return 0.0


def freshest(held: HeldGroup, lag: int, params: dict[str, Any]) -> float:
    """Rank by the version lag."""
    return lag


def prioritized(held: HeldGroup, lag: int, params: dict[str, Any]) -> float:
    """Rank by the spread of the members' rewards, the largest first."""
    return -held.spread


SAMPLERS: dict[str, Sampler] = {"fifo": fifo, "freshest": freshest, "prioritized": prioritized}


def sampler_of(name: str) -> Sampler:
    """Return the function of `buffer.sampler`. Raises ValueError for an own one that is unfit.

    An own one raises Unrecoverable, which names the key, where it returns no number.
    """
    sampler = implementation("buffer.sampler", name, SAMPLERS)
    if not is_own(name):
        return sampler

    def rank(held: HeldGroup, lag: int, params: dict[str, Any]) -> float:
        found = sampler(held, lag, params)
        try:
            value = float(found)
        except (TypeError, ValueError):
            value = math.nan
        if math.isnan(value):
            raise Unrecoverable(f"buffer.sampler: {name} returned {found!r}, which is no number")
        return value

    return rank
