"""Runs of benchmarks: each is trained once through the command line, then read."""

import json
import subprocess
import sys
from pathlib import Path

from evolver_async.metrics.newest_lineage import current_rows


def rows_of(run: Path) -> list[dict]:
    """Return the metrics of a run, that of the split test included; none if it is not complete."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = current_rows(map(json.loads, lines))
    done = any("eval/test/episodes" in row for row in rows)
    return rows if done else []


def call(*arguments: str) -> None:
    """Run one command of evolver-async; end this process if it fails."""
    command = [sys.executable, "-m", "evolver_async.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def train(recipe: Path, name: str, seed: int, out: Path) -> list[dict]:
    """Return the metrics of a run, which is trained first if it is not complete."""
    if not rows_of(out / name):
        where = [f"run.seed={seed}", f"run.dir={out}", f"run.name={name}", "metrics.panel=none"]
        call("train", str(recipe), *where)
    return rows_of(out / name)
