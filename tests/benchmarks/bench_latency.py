"""Groups per second under slow tools: asynchronous against synchronous, everything else equal.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_latency.py

Runs `configs/bench_latency.yaml` (lognormal environment latency) through the command line with
`buffer.max_staleness` 4, 1 and 0, and measures the steady part of the RL stage. Learner, actor,
data and steps are the same; only how far the actor may run ahead differs.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from evolver_async.config.load import load

BOUNDS = (4, 1, 0)
SKIPPED = 6  # steps until the pipeline of the largest bound is full and has turned over once
REQUIRED = 2.0  # of the largest bound against 0
RECIPE = Path(__file__).parents[2] / "configs" / "bench_latency.yaml"
GROUPS_PER_STEP = load(RECIPE, []).learner.groups_per_step


def train(bound: int, directory: Path) -> list[dict]:
    """One run; the metrics of its RL steps."""
    changes = [
        f"buffer.max_staleness={bound}",
        f"run.dir={directory}",
        f"run.name=staleness-{bound}",
        "metrics.panel=none",
    ]
    command = [sys.executable, "-m", "evolver_async.cli", "train", str(RECIPE), *changes]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    path = directory / f"staleness-{bound}" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row.get("stage_kind") == "rl"]


def main() -> None:
    rates: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for bound in BOUNDS:
            psutil.cpu_percent()
            start = time.perf_counter()
            rows = train(bound, Path(directory))
            seconds = time.perf_counter() - start
            first, *steady = rows[SKIPPED - 1 :]
            wall = steady[-1]["time_s"] - first["time_s"]
            rates[bound] = GROUPS_PER_STEP * len(steady) / wall
            means = {
                name: sum(row[name] for row in steady) / len(steady)
                for name in ("staleness/mean", "time/wait_s", "time/train_s", "train/turns_mean")
            }
            print(
                f"max_staleness {bound}: {rates[bound]:.2f} groups/s over {len(steady)} steps of "
                f"{wall / len(steady):.2f} s (wait {means['time/wait_s']:.2f}, train "
                f"{means['time/train_s']:.2f}), staleness {means['staleness/mean']:.1f}, "
                f"{means['train/turns_mean']:.1f} turns an episode; whole run {seconds:.0f} s with "
                f"{psutil.cpu_percent():.0f}% of all cores busy",
                flush=True,
            )
    for bound in BOUNDS[:-1]:
        required = f" (required {REQUIRED})" if bound == BOUNDS[0] else ""
        print(f"max_staleness {bound} against 0: {rates[bound] / rates[0]:.2f}x{required}")


if __name__ == "__main__":
    main()
