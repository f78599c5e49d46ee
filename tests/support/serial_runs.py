"""Whole runs of the serial launcher, in this process, for tests that look at what is left."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import process_mark
import torch
from safetensors.torch import load_file

from evolver_async.checkpoint.checkpoints import load_newest
from evolver_async.config.load import dump, load
from evolver_async.launch.registry import resolve
from evolver_async.launch.serial import run
from evolver_async.process.setup import RoleArgs

WALL_TIME = ("time", "throughput/", "weights/publish_s")


@dataclass
class Finished:
    """What a run left behind."""

    run_dir: Path
    rows: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]
    wall_s: float

    def rl(self, name: str) -> list[float]:
        """A metric over the steps of the rl stage that have it."""
        return [row[name] for row in self.rows if row.get("stage_kind") == "rl" and name in row]

    def numbers(self) -> list[dict[str, Any]]:
        """The rows without what depends on the clock on the wall."""
        return [
            {name: row[name] for name in row if not name.startswith(WALL_TIME)} for row in self.rows
        ]


def trainer(directory: Path, recipe: str) -> Callable[..., Finished]:
    """Runs the recipe with changes to its end: train(name, "key=value", ...)."""
    path = directory / "recipe.yaml"
    path.write_text(recipe)

    def train(name: str, *dotlist: str) -> Finished:
        run_dir = directory / name
        run_dir.mkdir()
        paths = [f"policy.path={run_dir}/policy", f"weights.dir={directory}"]
        config = load(path, [*paths, *dotlist])
        dump(config, run_dir / "config.yaml")
        resolve("prepare")(RoleArgs(address="", name="prepare", incarnation=0, run_dir=run_dir))
        process_mark.started.append("a whole run")
        start = time.perf_counter()
        assert run(config, run_dir) == 0
        wall_s = time.perf_counter() - start
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        newest, _ = load_newest(run_dir / "checkpoints", name)
        tensors = {
            f"{part}/{tensor}": value
            for part in ("model", "optimizer")
            for tensor, value in load_file(newest / f"{part}.safetensors").items()
        }
        return Finished(run_dir, [json.loads(line) for line in lines], tensors, wall_s)

    return train
