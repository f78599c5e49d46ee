"""The seconds of a run's processes by activity, which have to add up."""

from pathlib import Path

import pytest

from evolver_async.metrics.activity import ACTOR, LEARNER
from evolver_async.metrics.newest_lineage import current_rows
from evolver_async.metrics.tail import Tail


def check_shares(run_dir: Path, wall_s: float, actors: int, *, rows: int) -> None:
    """Check the shares of at least `rows` rows of each role, and their seconds over a whole run.

    `actors`: the largest number of actors that there can have been at once.
    """
    found = current_rows(Tail(run_dir / "metrics.jsonl").rows())
    for role, activities, processes in (("actor", ACTOR, actors), ("learner", LEARNER, 1)):
        name = f"throughput/{role}"
        timed = [row for row in found if f"{name}/seconds" in row]
        assert len(timed) >= rows
        for row in timed:
            shares = [row[f"{name}/{one}"] for one in activities]
            assert min(shares) >= 0 and sum(shares) == pytest.approx(1.0, abs=1e-6)
        assert 0 < sum(row[f"{name}/seconds"] for row in timed) < processes * wall_s
