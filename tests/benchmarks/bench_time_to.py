"""Time until the default recipe reaches a success, with and without slow tools, by staleness bound.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_time_to.py [--seeds 0] [--bounds 4 1 0]
        [--success .85] [--median-s 0.05] [KEY=VALUE ...]

Runs `configs/frozen_lake.yaml` through the command line until the greedy policy has the success
on 256 validation tasks, asked for every ten steps. Each step of the environment takes a lognormal
time (σ = 1) in the RL stages; `--median-s 0` leaves it out. Everything but `buffer.max_staleness`
is equal, and actors may run all groups of the largest step at once, so that a synchronous step
waits for its slowest episode only. Seconds count from the end of the supervised stage to the result
of the evaluation. One run follows another: nothing else may use the machine.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from training import call

from evolver_async.config.load import load

RECIPE = Path(__file__).parents[2] / "configs" / "frozen_lake.yaml"
EVERY = 10


@dataclass(frozen=True)
class Course:
    """Course of one run: the RL steps and seconds to the success, None if it is never there."""

    reached: float
    steps: int
    seconds: float | None
    used_s: float
    waited: float


def changes(seed: int, bound: int, success: float, median_s: float) -> list[str]:
    """List the overrides of one run."""
    stages = load(RECIPE, []).stages
    found = [
        f"run.seed={seed}",
        f"buffer.max_staleness={bound}",
        f"buffer.max_ready={int(bound > 0)}",  # at 0 staleness bounds ready groups already
        "actors.groups=40",
        "engine.slots=320",
        f"eval.every={EVERY}",
        "eval.final_episodes=0",
        "metrics.panel=none",
        "metrics.samples=0",
    ]
    for index, stage in enumerate(stages):
        if stage.kind == "rl":
            found.append(f"stages.{index}.until_success={success}")
            if median_s:
                latency = f"{{kind: lognormal, median_s: {median_s}, sigma: 1.0}}"
                found.append(f"stages.{index}.override.env.latency={latency}")
    return found


def train(directory: Path, dotlist: list[str]) -> tuple[list[dict], float]:
    """Run the recipe; return its rows of metrics and the processor seconds of all processes."""
    before = _used()
    call("train", str(RECIPE), f"run.dir={directory}", "run.name=course", *dotlist)
    lines = (directory / "course" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], _used() - before


def _used() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def course(rows: list[dict], success: float, used_s: float) -> Course:
    """Read the course of a run from its metrics."""
    steps = [row for row in rows if "stage_kind" in row]
    rl = [row for row in steps if row["stage_kind"] == "rl"]
    start = max(row["time_s"] for row in steps if row["stage_kind"] == "sft")
    asked = [row for row in rows if "eval/success" in row and row["step"] > rl[0]["step"]]
    there = next((row for row in asked if row["eval/success"] >= success), None)
    last = there or asked[-1]
    wait = sum(row["time/wait_s"] for row in rl if row["time_s"] <= last["time_s"])
    seconds = last["time_s"] - start
    return Course(
        last["eval/success"],
        last["step"] - rl[0]["step"] + 1,
        seconds if there else None,
        used_s,
        wait / seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--bounds", type=int, nargs="+", default=[4, 1, 0])
    parser.add_argument("--success", type=float, default=0.85)
    parser.add_argument("--median-s", type=float, default=0.05)
    parser.add_argument("changes", nargs="*", help="KEY=VALUE of every run")
    args = parser.parse_args()
    times: dict[int, list[float]] = {bound: [] for bound in args.bounds}
    for seed in args.seeds:
        for bound in args.bounds:
            begun = time.perf_counter()
            with tempfile.TemporaryDirectory() as directory:
                dotlist = changes(seed, bound, args.success, args.median_s) + args.changes
                rows, used_s = train(Path(directory), dotlist)
            one = course(rows, args.success, used_s)
            there = "never" if one.seconds is None else f"{one.seconds:.0f} s"
            times[bound].append(one.seconds if one.seconds is not None else float("inf"))
            print(
                f"seed {seed}, max_staleness {bound}: success {one.reached:.3f} after"
                f" {one.steps} RL steps, {there}; the learner waited {one.waited:.0%}; whole run"
                f" {time.perf_counter() - begun:.0f} s, {one.used_s:.0f} processor seconds",
                flush=True,
            )
    first = args.bounds[0]
    for bound in args.bounds[1:]:
        ratios = [b / a for a, b in zip(times[first], times[bound], strict=True)]
        print(
            f"max_staleness {bound} takes {statistics.median(ratios):.2f} times as long as {first}"
            f" ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
