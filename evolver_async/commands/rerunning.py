"""`rerun`: the steps of a run once more, exactly or with other settings."""

import argparse
import re
import sys
import time

from evolver_async.commands.checked import as_config_errors, run_directory
from evolver_async.config import ConfigError
from evolver_async.launch.registry import resolve
from evolver_async.runs.results.loaded_run import load_run
from evolver_async.runs.results.trajectories import TrajectoryGone
from evolver_async.terminal import say

STEPS = re.compile(r"(\d+)\.\.(\d+)")
EVERY_S = 10.0  # between two lines of progress


def rerun(args: argparse.Namespace) -> int:
    """Train the steps of a run again; return 1 if they are not those of the run."""
    from evolver_async.study.rerun import plan

    with as_config_errors():
        steps = None if args.steps is None else parse_steps(args.steps)
        made = plan(load_run(run_directory(args.run_dir)), args.positional, steps, args.out)
        last, shown = made.last + 1, time.monotonic()

        def progress(step: int) -> None:
            nonlocal shown
            if time.monotonic() - shown >= EVERY_S:
                shown = time.monotonic()
                say(f"step {step} of {last}", file=sys.stderr, flush=True)

        try:
            outcome = resolve("rerun")(made, progress)
        except TrajectoryGone as error:  # of a live run, whose journal drops segments meanwhile
            raise ConfigError(str(error)) from error
    say("\n".join(outcome.lines))
    return outcome.code


def parse_steps(text: str) -> tuple[int, int]:
    """Read A..B, the first and the last step from 1. ConfigError for anything else."""
    found = STEPS.fullmatch(text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(f"--steps: must be A..B with 1 <= A <= B, is {text!r}")
    return int(found[1]), int(found[2])
