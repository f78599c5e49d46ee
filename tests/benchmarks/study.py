"""Recipes compared over seeds: final success, the way there, what guided members gain.

    OMP_NUM_THREADS=1 python tests/benchmarks/study.py --out DIR --seeds 0 1 2 -- \
        configs/ablations/none.yaml configs/ablations/n.yaml

Runs each recipe with each seed through the command line, one after another; a run that is complete
in DIR is not repeated. The first recipe is what the others are compared with: how many RL steps
until the mean curve reaches 90 % of the best of its own. With --cold-start the first stage, which
all recipes must share, is trained once a seed, and every run begins with what it left.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from evolver_async.config.load import load
from evolver_async.metrics.lineages import current_rows


def rows_of(run: Path) -> list[dict]:
    """The metrics of a run, its last evaluation included; empty where it is not complete."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = current_rows(map(json.loads, lines))
    final = load(run / "config.yaml", []).eval.final_episodes if rows else 0
    done = any(row.get("eval/episodes") == final for row in rows)
    return rows if done else []


def call(*arguments: str) -> None:
    """One command of evolver-async; ends this process where it fails."""
    command = [sys.executable, "-m", "evolver_async.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def train(recipe: Path, name: str, seed: int, out: Path, changes: list[str]) -> list[dict]:
    """One run's metrics."""
    if not rows_of(out / name):
        where = [f"run.seed={seed}", f"run.dir={out}", f"run.name={name}", "metrics.panel=none"]
        call("train", str(recipe), *where, *changes)
    return rows_of(out / name)


def cold_start(recipe: Path, seed: int, out: Path) -> list[str]:
    """Trains and exports the recipe's first stage; what makes a run go on from there."""
    first, *others = (asdict(stage) for stage in load(recipe, []).stages)
    directory = out / f"cold-{seed}-policy"
    if not directory.exists():
        train(recipe, f"cold-{seed}", seed, out, [f"stages={json.dumps([first])}"])
        call("export", str(out / f"cold-{seed}"), str(directory))
    return [f"policy.path={directory}", f"stages={json.dumps(others)}"]


def curve_of(rows: list[dict]) -> dict[int, float]:
    """Success on held-out tasks by RL steps since the cold start."""
    began = min(row["step"] for row in rows if row.get("stage_kind") == "rl") - 1
    return {r["step"] - began: r["eval/success"] for r in rows if "eval/success" in r}


def mean_curve(curves: list[dict[int, float]]) -> dict[int, float]:
    """The mean over seeds where all of them were evaluated."""
    common = set.intersection(*(set(curve) for curve in curves))
    return {step: statistics.fmean(curve[step] for curve in curves) for step in sorted(common)}


def gain_of(rows: list[dict], filling: float) -> tuple[float, float, int]:
    """Guided less unguided success within groups, over the steps at which the pool of experience
    had less than `filling` of its final size: mean, half width of its 95 % interval, steps."""
    final = max(row.get("experience/pool_size", 0.0) for row in rows)
    gains = [
        row["experience/guided_gain"]
        for row in rows
        if "experience/guided_gain" in row and row["experience/pool_size"] < filling * final
    ]
    if len(gains) < 2:
        return 0.0, 0.0, 0
    error = 1.96 * statistics.stdev(gains) / len(gains) ** 0.5
    return statistics.fmean(gains), error, len(gains)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cold-start", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="changes")
    args = parser.parse_args()
    goal: float | None = None
    for recipe in args.recipes:
        runs = []
        for seed in args.seeds:
            begin = cold_start(args.recipes[0], seed, args.out) if args.cold_start else []
            runs.append(
                train(recipe, f"{recipe.stem}-{seed}", seed, args.out, begin + args.changes)
            )
        curves = [curve_of(rows) for rows in runs]
        means = mean_curve(curves)
        goal = 0.9 * max(means.values()) if goal is None else goal
        reached = next((step for step, value in means.items() if value >= goal), None)
        finals = [curve[max(curve)] for curve in curves]
        area = statistics.fmean(means.values())
        each = ", ".join(f"{final:.3f}" for final in finals)
        print(
            f"{recipe.stem}: final {statistics.fmean(finals):.3f} ({each}), mean of the curve"
            f" {area:.3f}, {goal:.3f} reached after {reached} steps"
        )
        print(f"  curve {' '.join(f'{step}:{value:.3f}' for step, value in means.items())}")
        every = [row for rows in runs for row in rows]
        for filling in (0.5, 0.8, 2.0):
            mean, error, count = gain_of(every, filling)
            if count:
                print(
                    f"  guided members gain {mean:+.3f} ± {error:.3f} over {count} steps with the"
                    f" pool below {min(1.0, filling):.0%} of its final size"
                )


if __name__ == "__main__":
    main()
