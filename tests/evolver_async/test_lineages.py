"""Versions over forks, and the weights of a trajectory that can be the furthest away."""

import numpy as np
import pytest
from episodes import episode

from evolver_async.lineages import Fork, ends, version_lag
from evolver_async.schema import Role, Sequence, VersionRun, WeightId

FORKS = {
    1: Fork(lineage=1, parent=0, step=0),
    2: Fork(lineage=2, parent=1, step=4),
    3: Fork(lineage=3, parent=2, step=6),
}


def version(lineage: int, step: int) -> WeightId:
    return WeightId(lineage=lineage, step=step)


def sampled_by(*weights: WeightId) -> Sequence:
    """A context with one ACTION token of each of these weights."""
    count = len(weights)
    return Sequence(
        tokens=np.zeros(1 + count, np.int32),
        roles=np.array([Role.PROMPT] + [Role.ACTION] * count, np.uint8),
        turns=np.array([-1] + [0] * count, np.int16),
        logprobs=np.zeros(1 + count, np.float32),
        versions=[VersionRun(weights=one, tokens=1) for one in weights],
    )


@pytest.mark.parametrize(
    ("sampled", "lag"),
    [((3, 8), 0), ((3, 7), 1), ((2, 6), 2), ((2, 9), 5), ((1, 3), 5), ((1, 7), 7)],
)
def test_versions_are_counted_by_way_of_the_common_ancestor(
    sampled: tuple[int, int], lag: int
) -> None:
    assert version_lag(version(3, 8), version(*sampled), FORKS) == lag


def test_the_ends_are_the_oldest_and_the_newest_weights_of_each_lineage() -> None:
    """Of either end: before a fork the oldest, past it the newest is the furthest from the head."""
    contexts = sampled_by(version(1, 3), version(1, 5), version(1, 7)), sampled_by(version(2, 9))
    one = episode(*contexts, sampled_by(version(2, 8), version(2, 8)))
    assert ends(one) == [version(1, 3), version(1, 7), version(2, 8), version(2, 9)]
    lags = [version_lag(version(3, 8), weights, FORKS) for weights in ends(one)]
    assert max(lags) == version_lag(version(3, 8), version(1, 7), FORKS) == 7
    assert ends(episode(sampled_by(version(1, 3)))) == [version(1, 3)]
    assert ends(episode(sampled_by())) == []
