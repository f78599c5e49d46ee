"""Rewards of several trajectories: their equality, their spread, means by term and player. Pure.

Rewards are sums of weighted terms, so equal ones can differ in their last digits: .1 + .2 and .3.
A difference of that size would be standardised to advantages of ±1.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

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
    return _means(one.terms for one in trajectories)


def player_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the means of `player_outcomes`, over the trajectories that have the player."""
    return _means(map(player_outcomes, trajectories))


def player_outcomes(trajectory: Trajectory) -> dict[str, float]:
    """Return reward and success of every player, by the ends of their metrics."""
    found: dict[str, float] = {}
    for player in trajectory.players:
        found[f"player/{player.name}/reward"] = player.reward
        found[f"player/{player.name}/success"] = float(player.success)
    return found


def _means(numbers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for one in numbers:
        for name, value in one.items():
            by_name.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in by_name.items()}
