"""Fault 3 with every option: serial runs of drawn configurations, whose learner dies in any take.

    FAULT_RUNS=400 make faults ARGS=-kdrawn_options    runs 0 to 399, each with a seed of its own

What a take was is a function of what is on disk: every repeated take trains bitwise the same.
"""

import os
import random
from pathlib import Path
from typing import Any

import pytest
from drawn_options import Died, draw, finite_rows
from invariants import check_run
from live import check_repeats

from evolver_async.errors import TrainingError
from evolver_async.launch.serial import run
from learner.diagnostics.step_rows import StepRows
from learner.state import LearnerState

RUNS = int(os.environ.get("FAULT_RUNS", "16"))
DEATHS = 3


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_run_of_drawn_options_ends_whole_after_every_death(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    drawn = draw(rng, tmp_path, seed)
    print(*drawn.changes, *drawn.refused, sep="\n")
    deaths = sorted(rng.sample(range(9), DEATHS))
    write = StepRows.write

    def die(self: StepRows, state: LearnerState, take: int, *rest: Any) -> None:
        write(self, state, take, *rest)
        if deaths and take >= deaths[0]:
            deaths.pop(0)
            raise Died

    monkeypatch.setattr(StepRows, "write", die)
    code = None
    while code is None:
        try:
            code = run(drawn.config, drawn.run_dir)
        except Died:
            continue
        except TrainingError as error:
            print("ended:", error)
            break
    assert code in (0, None)
    check_run(drawn.run_dir)
    check_repeats(drawn.run_dir)
    finite_rows(drawn.run_dir)
