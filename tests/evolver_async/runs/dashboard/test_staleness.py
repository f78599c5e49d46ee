"""Measures by version lag over several steps."""

import pytest

from evolver_async.runs.dashboard.staleness import measure
from evolver_async.runs.results.table import MetricTable

ROWS = [  # one long failure, then three short successes
    {"trajectories": 1.0, "tokens": 90.0, "reward_mean": 0.0, "length_mean": 90.0, "ess": 0.5},
    {"trajectories": 3.0, "tokens": 30.0, "reward_mean": 1.0, "length_mean": 10.0, "ess": 0.9},
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trajectories", 4),
        ("tokens", 120),
        ("reward_mean", 0.75),
        ("length_mean", 30),
        ("ess", 0.6),
    ],
)
def test_means_of_trajectories_are_not_weighted_by_their_tokens(name: str, expected: float) -> None:
    steps = MetricTable([{f"lag_1/{key}": value for key, value in row.items()} for row in ROWS])
    assert measure(steps, "1", name) == pytest.approx(expected)
    assert measure(steps, "2", name) is None
