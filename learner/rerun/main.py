"""The role `rerun`: a plan's takes are trained again, exactly or with other settings."""

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from evolver_async.checkpoint import checkpoints as checkpoint
from evolver_async.study.rerun import RerunPlan
from learner.checks import check
from learner.rerun.comparison import checkpoint_difference, entered, metric_difference
from learner.rerun.counterfactual import train
from learner.rerun.retrainer import Retrainer

Progress = Callable[[int], None]  # gets the number of each step that was trained

DIFFERENT = 1  # exit code of a rerun whose steps are not those of the run


@dataclass(frozen=True)
class RerunOutcome:
    """Exit code of a rerun, and its result in lines for people."""

    code: int
    lines: list[str]


def rerun(made: RerunPlan, progress: Progress) -> RerunOutcome:
    """Train the steps of a plan once more and compare them with the run."""
    torch.set_num_threads((made.changed or made.config).learner.threads)
    if made.changed is not None:
        check(made.changed)
        return RerunOutcome(0, train(made, progress))
    with tempfile.TemporaryDirectory(prefix="evolver-rerun-") as work:
        return verify(made, Path(work), progress)


def verify(made: RerunPlan, work: Path, progress: Progress) -> RerunOutcome:
    """Compare metrics at every step and tensors at every checkpoint, bit by bit."""
    start = time.perf_counter()
    written = checkpoint.resumable(made.results.path / "checkpoints")
    trainer = Retrainer(made, made.config, work, made.start)
    metric, tensor, compared, checkpoints = "", "", 0, 0
    for number in range(made.begin, made.last + 1):
        stage = trainer.state.stage
        outcome, _ = trainer.step()
        found = {
            "stage": float(stage),
            "stage_kind": made.config.stages[stage].kind,
            "version": float(trainer.state.version),
            **outcome.metrics,
        }
        row = made.rows.get(number)
        if row is not None:
            compared += 1
            metric = metric or _at(number, metric_difference(row, found))
        elif made.line[number].version is not None and number < max(made.line):
            metric = metric or f"step {number + 1}: metrics.jsonl has no row of it"
        for path, manifest in written:
            if manifest.step != trainer.state.take:
                continue
            difference = compare_checkpoint(path, trainer, work / "again")
            if difference is not None:
                checkpoints += 1
                tensor = tensor or _at(number, difference and f"{path.name}: {difference}")
        progress(number + 1)
    seconds = time.perf_counter() - start
    steps = f"steps {made.begin + 1} to {made.last + 1}"
    if metric or tensor:
        lines = [one for one in (metric, tensor) if one]
        if not tensor and checkpoints:
            lines.append(f"the tensors of all {checkpoints} checkpoints are equal")
        return RerunOutcome(DIFFERENT, [f"different from the run in {steps}:", *lines])
    return RerunOutcome(
        0,
        [f"bitwise equal: {compared} steps, {checkpoints} checkpoints ({steps}, {seconds:.1f} s)"],
    )


def compare_checkpoint(path: Path, trainer: Retrainer, again: Path) -> str | None:
    """Name the first difference of a checkpoint, "" without one; None if the run has removed it."""
    if trainer.state.entered < trainer.state.stage and entered(path, trainer.state):
        trainer.enter()
    again.mkdir(exist_ok=True)
    for old in again.iterdir():
        old.unlink()
    trainer.updater.save(again, trainer.state)
    with suppress(FileNotFoundError):
        return checkpoint_difference(path, again)
    if path.exists():
        return "a file of it is missing"
    return None


def _at(number: int, difference: str) -> str:
    return difference and f"step {number + 1}: {difference}"
