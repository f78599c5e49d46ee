"""Every recipe in its size for two cores, over seeds, against what it must reach.

    OMP_NUM_THREADS=1 python tests/benchmarks/recipes.py --out DIR [--seeds 0 1 2] [--only NAME ...]

Runs one after another through the command line; a run that is complete in DIR is not repeated. The
exit code is 1 where one misses its mark. Recipes without a mark are run and reported.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training import train

CONFIGS = Path(__file__).parents[2] / "configs"
Rows = list[dict]


def final(rows: Rows) -> float:
    """Success on the split test at the end."""
    return [row["eval/test/avg@1"] for row in rows if "eval/test/avg@1" in row][-1]


def gained(rows: Rows) -> float:
    """How much more of the held-out tasks succeed at the end than after the cold start."""
    return final(rows) - next(row["eval/success"] for row in rows if "eval/success" in row)


def survived(rows: Rows) -> float:
    """How much more succeeds in training in the last ten RL steps than in the first ten."""
    shares = [row["train/success"] for row in rows if "train/success" in row and row["stage"] > 0]
    return statistics.fmean(shares[-10:]) - statistics.fmean(shares[:10])


def fewest_tool_errors(rows: Rows) -> float:
    """1 less the share of turns with a tool error in the last ten RL steps."""
    shares = [row["train/tool_errors"] for row in rows if "train/tool_errors" in row]
    return 1.0 - statistics.fmean(shares[-10:])


def warned(rows: Rows) -> float:
    """1 where success in training falls to 0, for so many steps on end, after an alarm."""
    learning = [row for row in rows if "train/success" in row and row["stage"] > 0]
    fired = [row["step"] for row in learning if any(row.get(alarm) for alarm in ALARMS)]
    streak = 0
    for row in learning:
        streak = 0 if row["train/success"] > 0 else streak + 1
        if streak == DEAD_STEPS:
            return float(bool(fired) and fired[0] <= row["step"] - DEAD_STEPS)
    return 0.0


DEAD_STEPS = 10  # without a single success: a collapse
ALARMS = {
    f"alarm/{name}"
    for name in (
        "reward_spread",
        "zero_variance",
        "entropy_low",
        "input_dependence",
        "format_errors",
    )
}


@dataclass(frozen=True)
class Mark:
    """What `measure` must reach: the mean over seeds, or `each` of them."""

    recipe: str
    least: float | None = None
    measure: Callable[[Rows], float] = final
    each: bool = False
    seeds: int = 3


MARKS = (
    Mark("bandit", 0.95, each=True, seeds=5),
    Mark("bandit_ppo", 0.95, each=True, seeds=5),
    Mark("starpo_s", 0.75),
    Mark("starpo_s_slippery", 0.68),
    Mark("starpo_ppo", 0.75),
    Mark("sokoban", 0.15, gained),
    Mark("retool", 0.97),
    Mark("retool", 0.95, fewest_tool_errors),
    Mark("grpo_roc", 0.97),
    Mark("grpo_roc", 0.95, fewest_tool_errors),
    Mark("echo_trap", 1.0, warned, each=True),
    Mark("echo_trap_rollback", 0.0, survived, each=True),
    Mark("echo_trap_starpo_s", 0.0, survived),
    Mark("imitation"),
    Mark("early_experience"),
    Mark("self_reflection"),
    Mark("starpo_grpo"),
    Mark("bilevel_gae"),
    Mark("ppo"),
    Mark("reinforce"),
    Mark("rloo"),
    Mark("dapo"),
    Mark("deepseekmath_grpo"),
    Mark("dpo"),
    Mark("classic", 0.15, gained),
    Mark("cliff_walking"),
    Mark("webshop", 0.7),
)
SCARCE = ("early_experience", "imitation", 0.06)  # so much more, on average, with experience


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--only", nargs="*", default=[mark.recipe for mark in MARKS])
    args = parser.parse_args()
    missed, means = [], dict[str, float]()
    for mark in MARKS:
        if mark.recipe not in args.only:
            continue
        began = time.monotonic()
        seeds = args.seeds or range(mark.seeds)
        recipe = CONFIGS / f"{mark.recipe}.yaml"
        values = [
            mark.measure(train(recipe, f"{mark.recipe}-{seed}", seed, args.out)) for seed in seeds
        ]
        mean, least = statistics.fmean(values), mark.least
        if mark.measure is final:
            means[mark.recipe] = mean
        reached = least is None or (min(values) if mark.each else mean) >= least
        if not reached:
            missed.append(mark.recipe)
        wanted = "" if least is None else f", {'each' if mark.each else 'mean'} ≥ {least}"
        print(
            f"{mark.recipe}, {mark.measure.__name__}: {mean:.3f}"
            f" ({', '.join(f'{value:.3f}' for value in values)}){wanted}:"
            f" {'reached' if reached else 'MISSED'}, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    better, worse, least = SCARCE
    if {better, worse} <= means.keys():
        gain = means[better] - means[worse]
        print(f"{better} over {worse}: {gain:+.3f}, at least {least:+}")
        if gain < least:
            missed.append(better)
    print(f"missed: {', '.join(missed)}" if missed else "all reached")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
