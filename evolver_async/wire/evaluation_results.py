"""Results of evaluations, as the buffer gives them to the learner."""

import msgspec

from evolver_async.schema import WeightId


class SetResult(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Result of a set of `eval.sets`; `best_*` are means over `tasks` with all `k` samples.

    `distinct`: number of different tasks among the episodes; `numbers`: mean of each reward term,
    `reward/<name>`, and of each number of the environment's own, `env/<name>`; `lost`: episodes
    that could not be run, without which the averages are of other tasks.
    """

    name: str
    k: int
    episodes: int
    success: float
    reward_mean: float
    turns_mean: float
    tasks: int
    best_success: float
    best_reward: float
    distinct: int
    lost: int = 0
    numbers: dict[str, float] = {}


class EvalResult(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Result of an evaluation of exact weights over `episodes` held-out episodes and of `sets`.

    `distinct`: number of different tasks among the episodes; `numbers`: mean of each reward term,
    `reward/<name>`, and of each number of the environment's own, `env/<name>`; `lost`: episodes
    that could not be run, without which the averages are of other tasks.
    """

    weights: WeightId
    step: int
    episodes: int
    success: float
    reward_mean: float
    turns_mean: float
    distinct: int
    lost: int = 0
    numbers: dict[str, float] = {}
    sets: list[SetResult] = []
