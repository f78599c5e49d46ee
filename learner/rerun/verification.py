"""The role `rerun`: a plan's takes are trained again, exactly or with other settings."""

import math
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evolver_async.checkpoint import checkpoints as checkpoint
from evolver_async.checkpoint import history, shards
from evolver_async.study.rerun import RerunPlan
from learner.checks import check
from learner.rerun.counterfactual import train
from learner.rerun.retrainer import Retrainer
from learner.state import LearnerState

Progress = Callable[[int], None]  # gets the number of each step that was trained

# State of the global random generator: no step draws from it, and actors share it in serial runs.
SKIPPED = ("rng",)
NUMBERS = ("take", "version", "baseline", "critic_steps", "bad_steps")
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


def metric_difference(row: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Name the first metric of a step that differs from the run's row; "" if all are equal."""
    for name, value in found.items():
        again = _plain(value)
        if name not in row:
            return f"{name} is not in metrics.jsonl, {again!r} again"
        if row[name] != again:
            return f"{name} is {row[name]!r} in metrics.jsonl, {again!r} again"
    return ""


def checkpoint_difference(written: Path, again: Path) -> str:
    """Name the first tensor or number of two checkpoints that differs; "" if all are equal."""
    names = sorted(_parts(written) | _parts(again), key=lambda name: (name != "model", name))
    for name in names:
        for directory, owner in ((written, "rerun"), (again, "run")):
            if not shards.exists(directory, name):
                return f"{name} exists only in the checkpoint of the {owner}"
        if difference := _tensor_difference(shards.read(written, name), shards.read(again, name)):
            return f"{name}/{difference}"
    ours, theirs = history.numbers(again), history.numbers(written)
    for name in NUMBERS:
        if ours[name] != theirs.get(name):
            return f"state.json: {name} is {theirs.get(name)!r} in the run, {ours[name]!r} again"
    return ""


def entered(checkpoint: Path, state: LearnerState) -> bool:
    """Return True if the run had begun the stage of `state` when it wrote the checkpoint."""
    return history.numbers(checkpoint).get("entered", -1) == state.stage


def _plain(value: Any) -> Any:
    """Return a metric as metrics.jsonl holds it: numbers that are not finite are null."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parts(directory: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in directory.glob("*.safetensors")}


def _tensor_difference(written: dict[str, torch.Tensor], again: dict[str, torch.Tensor]) -> str:
    for name in sorted(written.keys() | again.keys()):
        if name in SKIPPED:
            continue
        if name not in written or name not in again:
            owner = "run" if name in written else "rerun"
            return f"{name} exists only in the checkpoint of the {owner}"
        old, new = written[name], again[name]
        if old.shape != new.shape or old.dtype != new.dtype:
            return (
                f"{name} is {list(old.shape)} {old.dtype} in the run,"
                f" {list(new.shape)} {new.dtype} again"
            )
        if not torch.equal(_bits(old), _bits(new)):
            unequal = int((_bits(old) != _bits(new)).any(-1).sum())
            distance = float((old.double() - new.double()).abs().max())
            return f"{name} differs in {unequal} of {old.numel()} numbers, by up to {distance:.3g}"
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as the bytes of its numbers, uint8[numbers, bytes]."""
    flat = tensor.detach().cpu().contiguous().reshape(-1, 1)
    return flat.view(torch.uint8)
