"""A real run says where the seconds of its processes went."""

import subprocess
import time
from pathlib import Path

import pytest
from launches import COMMAND, DEADLINE_S

from evolver_async.metrics.activity import ACTOR, LEARNER
from evolver_async.metrics.lineages import current_rows
from evolver_async.metrics.tail import Tail

CHANGES = ("stages.0.steps=8", "stages.1.steps=8", "eval.episodes=8", "metrics.panel=none")


@pytest.mark.process
@pytest.mark.parametrize("kind", ["local", "serial"])
def test_the_shares_of_every_process_add_up(tmp_path: Path, kind: str) -> None:
    run = (f"run.dir={tmp_path}", "run.name=timed", f"launch.kind={kind}")
    began = time.monotonic()
    done = subprocess.run(
        [*COMMAND, "train", "bandit", *run, *CHANGES],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    wall_s = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    rows = current_rows(Tail(tmp_path / "timed" / "metrics.jsonl").rows())
    for role, activities, processes in (("actor", ACTOR, 2), ("learner", LEARNER, 1)):
        name = f"throughput/{role}"
        timed = [row for row in rows if f"{name}/seconds" in row]
        assert len(timed) >= 8
        for row in timed:
            shares = [row[f"{name}/{one}"] for one in activities]
            assert min(shares) >= 0 and sum(shares) == pytest.approx(1.0, abs=1e-6)
        assert 0 < sum(row[f"{name}/seconds"] for row in timed) < processes * wall_s
    assert "\nactors " in done.stdout and "learner " in done.stdout
    assert " wait" in done.stdout, "the advice says for what"
    if kind == "serial":
        assert "launch.kind=local" in done.stdout
