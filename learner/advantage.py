"""Advantage estimators: rewards of trajectories in, one advantage per trajectory out. Pure.

Computed after selection, on the kept members. reward_P float64 are the outcome rewards of P
trajectories, group_P int their group indices. Formulas: algorithms §3.
"""

import numpy as np

from evolver_async.schema import Array

EPSILON = 1e-6


def advantages(
    kind: str, reward_P: Array, group_P: Array, *, std: str, baseline: float, baseline_decay: float
) -> tuple[Array, float]:
    """The advantages by estimator `kind`, and the running baseline for the next step.

    Only `reinforce` reads or changes the baseline; only `grpo` reads `std`.
    """
    if kind == "grpo":
        return grpo(reward_P, group_P, std=std), baseline
    if kind == "rloo":
        return rloo(reward_P, group_P), baseline
    assert kind == "reinforce", kind
    return reinforce(reward_P, baseline, decay=baseline_decay)


def finite_groups(x_P: Array, group_P: Array) -> Array:
    """bool[P]: whether x is finite for every member of the trajectory's group."""
    return np.bincount(group_P, weights=~np.isfinite(x_P))[group_P] == 0


def grpo(reward_P: Array, group_P: Array, *, std: str) -> Array:
    """A_i = (R_i - mean_G R) / (std + 1e-6); 0 throughout a group whose rewards are all the same.

    `std`: `group` (population std of the group), `batch` (of all P rewards) or `none` (no division,
    Dr. GRPO).
    """
    mean_P = _group_mean(reward_P, group_P)
    centred_P = np.where(zero_spread(reward_P, group_P), 0.0, reward_P - mean_P)
    if std == "none":
        return centred_P
    if std == "batch":
        return centred_P / (reward_P.std() + EPSILON)
    assert std == "group", std
    return centred_P / (np.sqrt(_group_mean(centred_P**2, group_P)) + EPSILON)


def rloo(reward_P: Array, group_P: Array) -> Array:
    """A_i = R_i - mean of the other members' rewards; groups need at least two members."""
    size_P = np.bincount(group_P)[group_P]
    assert size_P.min() > 1, "rloo: a group of one has no others"
    others_P = _group_mean(reward_P, group_P) * size_P - reward_P
    return reward_P - others_P / (size_P - 1)


def reinforce(reward_P: Array, baseline: float, *, decay: float) -> tuple[Array, float]:
    """A = R - b with the running baseline b, which then becomes decay b + (1 - decay) mean R."""
    return reward_P - baseline, decay * baseline + (1 - decay) * float(reward_P.mean())


def penalised_rewards(reward_P: Array, kl_N: Array, trajectory_N: Array, coef: float) -> Array:
    """Rewards less `coef` times the KL estimates summed over the trajectory's ACTION tokens."""
    return reward_P - coef * np.bincount(trajectory_N, weights=kl_N, minlength=len(reward_P))


def zero_spread(reward_P: Array, group_P: Array) -> Array:
    """bool[P]: whether all members of the trajectory's group have the same reward."""
    low_G = np.full(int(group_P.max()) + 1, np.inf)
    high_G = -low_G
    np.minimum.at(low_G, group_P, reward_P)
    np.maximum.at(high_G, group_P, reward_P)
    return (low_G == high_G)[group_P]


def _group_mean(x_P: Array, group_P: Array) -> Array:
    """The mean of x over the group of each trajectory."""
    return (np.bincount(group_P, weights=x_P) / np.maximum(np.bincount(group_P), 1))[group_P]
