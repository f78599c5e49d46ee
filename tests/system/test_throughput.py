"""A real run says where the seconds of its processes went."""

import subprocess
import time
from pathlib import Path

import pytest
from launches import COMMAND, DEADLINE_S
from shares import check_shares

CHANGES = ("stages.0.steps=4", "stages.1.steps=8", "eval.episodes=8", "metrics.panel=none")


@pytest.mark.process
def test_the_shares_of_a_serial_run_add_up(tmp_path: Path) -> None:
    """Those of several processes: see test_local.py."""
    run = (f"run.dir={tmp_path}", "run.name=timed", "launch.kind=serial")
    began = time.monotonic()
    done = subprocess.run(
        [*COMMAND, "train", "bandit", *run, *CHANGES],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    wall_s = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    check_shares(tmp_path / "timed", wall_s, 2, rows=8)
    assert "\nactors " in done.stdout and "learner " in done.stdout
    assert " wait" in done.stdout, "the advice says for what"
    assert "launch.kind=local" in done.stdout
