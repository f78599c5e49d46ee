"""Exact comparison of a repeated training with the rows and checkpoints of the run."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evolver_async.checkpoint import history, shards
from learner.state import LearnerState

# State of the global random generator: no step draws from it, and actors share it in serial runs.
SKIPPED = ("rng",)
NUMBERS = ("take", "version", "baseline", "critic_steps", "bad_steps")


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
