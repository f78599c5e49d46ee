"""Families of metrics: the axis and the summary that W&B gives to each name.

The columns `step`, `progress/env_steps`, `progress/tokens` and `time_s` are in every row of
metrics.jsonl, so that a curve can be drawn over any of them; the axis is that of the first look.
"""

import math
import re

STEP, ENV_STEPS, TOKENS, SECONDS = "step", "progress/env_steps", "progress/tokens", "time_s"
CLOCK = "clock_s"  # of the gauges, which belong to no step: seconds since the first of them
AXES = (STEP, ENV_STEPS, TOKENS, SECONDS, CLOCK)

FAMILIES: dict[str, tuple[str, ...]] = {
    STEP: (
        *("train", "staleness", "offpolicy", "offpolicy_guided", "offpolicy_unguided", "loss"),
        *("learner", "critic", "dpo", "kto", "selection", "overlong", "boost", "advantage"),
        *("histogram", "teacher", "serve"),
        *("safety", "alarm", "buffer", "actors", "censor", "weights", "wandb", "trajectories"),
        *("guidance", "offpolicy_swapped", "env", "engine", "player", "reward_model", "validation"),
        *(f"lag_{bucket}" for bucket in ("0", "1", "2", "3-4", "5-8", "9+", "recorded")),
        "data",
    ),
    ENV_STEPS: (
        *("eval", "agent", "env_service", "experience", "questioning", "reflection", "judge"),
        *("failures", "reward"),
    ),
    TOKENS: ("ledger",),
    SECONDS: ("throughput", "supervision", "time"),
    CLOCK: ("process", "host"),
}
AXIS_OF = {family: axis for axis, families in FAMILIES.items() for family in families}

EVAL_METRICS = tuple(  # of an evaluation; those of its sets are eval/<set>/<name>
    f"eval/{name}"
    for name in (
        *("success", "reward_mean", "turns_mean", "episodes", "lost", "distinct", "version"),
        "stage",
    )
)
SET_METRIC = re.compile(
    r"eval/[^/]+/((avg|best|reward_best)@\d+|reward_mean|turns_mean|episodes|lost|distinct"
    r"|(reward|env)/[\w.@-]+|player/[\w-]+/(reward|success))"
)

BEST = {  # the best or the worst value beside the last one
    "eval/success": "max",
    "eval/reward_mean": "max",
    "train/success": "max",
    "train/reward_mean": "max",
    "throughput/tokens_per_s": "max",
    "throughput/groups_per_s": "max",
    "dpo/accuracy": "max",
    "reward_model/accuracy": "max",
    "validation/loss": "min",
    "validation/accuracy": "max",
    "offpolicy/ess": "min",
    "offpolicy/kl": "max",
    "staleness/max": "max",
    "loss/grad_norm": "max",
    "wandb/restarts": "max",
    "supervision/longest_s": "max",
}


# Means over episodes, turns or tokens of what is true or false; and the share of an ideal sample.
RATE = re.compile(
    r"(.*/)?(success|(avg|best)@\d+)|train/success/.+|validation/token_accuracy"
    r"|(dpo|kto|reward_model|validation)/accuracy"
    r"|offpolicy\w*/(ess|masked|clip_low|clip_high)"
)
NOT_NEGATIVE = ("offpolicy/kl", "staleness/mean")


def bounds_of(name: str) -> tuple[float, float]:
    """Return the least and the largest value that a metric can have; infinite ones if unknown."""
    if RATE.fullmatch(name):
        return 0.0, 1.0
    return 0.0 if name in NOT_NEGATIVE else -math.inf, math.inf


def evaluated(name: str) -> bool:
    """True if an evaluation or one of its sets can have the metric."""
    known = name in EVAL_METRICS or name.startswith(("eval/reward/", "eval/env/", "eval/player/"))
    return known or SET_METRIC.fullmatch(name) is not None


def axis_of(name: str) -> str | None:
    """Return the axis of a metric, None for an axis itself or for a column without a family."""
    if name in AXES or ("/" not in name and name not in AXIS_OF):
        return None
    return AXIS_OF.get(name.partition("/")[0], STEP)


def summary_of(name: str) -> str | None:
    """Return the values that W&B's summary holds of a metric, None for the last one alone."""
    if name in BEST:
        return f"{BEST[name]},last"
    if name.startswith("process/") and name.endswith("_bytes"):
        return "max,last"
    return None
