"""Rewards of several trajectories: their equality, their spread, the means of their terms. Pure.

Rewards are sums of weighted terms, so equal ones can differ in their last digits: .1 + .2 and .3.
A difference of that size would be standardised to advantages of ±1.
"""

import statistics
from collections.abc import Sequence

import numpy as np

from evolver_async.schema import Array, Trajectory

EQUAL = 1e-6  # rewards that differ by less are equal


def alike(rewards: Sequence[float]) -> bool:
    """Return True if all rewards are equal."""
    return max(rewards) - min(rewards) < EQUAL


def spread(rewards: Sequence[float]) -> float:
    """Return the population std of the rewards; exactly 0 if all are equal."""
    return 0.0 if alike(rewards) else statistics.pstdev(rewards)


def alike_in_group(x: Array, group: Array) -> Array:
    """Return for every number True if all numbers of its group are equal; group: index of each."""
    low_G = np.full(int(group.max()) + 1, np.inf)
    high_G = -low_G
    np.minimum.at(low_G, group, x)
    np.maximum.at(high_G, group, x)
    return (high_G - low_G < EQUAL)[group]


def reaches(value: float, threshold: float) -> bool:
    """Return True if a value is at least the threshold, or equal to it."""
    return value > threshold - EQUAL


def term_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return by name the mean of each reward term, over the trajectories that have it."""
    by_term: dict[str, list[float]] = {}
    for one in trajectories:
        for name, value in one.terms.items():
            by_term.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in by_term.items()}
