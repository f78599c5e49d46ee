"""Advantage estimators that compare members of a group: one advantage per turn. Pure.

They see the members that selection kept. Estimators of the outcome give all turns of a trajectory
the same advantage. Turns are flat over the turns of all trajectories: the letter U. Formulas:
docs/algorithms.md, Advantages.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from evolver_async.config import AdvantageConfig
from evolver_async.config.values.kinds import AdvantageKind
from evolver_async.extension import Builtins, is_own
from evolver_async.rewards import alike_in_group
from evolver_async.schema import Array
from learner.advantage.shaped_rewards import Rewards

EPSILON = 1e-6


@dataclass(frozen=True)
class EstimatorInput:
    """Inputs of an estimator beside the rewards of its trajectories.

    alpha: the weight of labels at this step; baseline: the running mean of earlier rewards;
    log_weight_P: the log of exp(anchor - old) over all tokens of each trajectory, bounded, 0 for
    kinds that read no anchor; length_P: the ACTION tokens of each; lag_P, lag_U int64:
    the largest version lag of the tokens of each trajectory, and of each turn, -1 of one of a log.
    The group of a trajectory is in the rewards. `metrics`: takes numbers of the estimator's own,
    which are logged as advantage/own/<name>.
    """

    alpha: float
    baseline: float
    log_weight_P: Array
    length_P: Array
    lag_P: Array
    lag_U: Array
    metrics: dict[str, float] = field(default_factory=dict)

    def of(self, kept_P: Array, kept_U: Array) -> "EstimatorInput":
        """Return that of the trajectories `kept_P` alone, bool[P], whose turns are `kept_U`."""
        return replace(
            self,
            log_weight_P=self.log_weight_P[kept_P],
            length_P=self.length_P[kept_P],
            lag_P=self.lag_P[kept_P],
            lag_U=self.lag_U[kept_U],
        )


Estimated = tuple[Array, float]  # the advantages of all turns, and the next running baseline
Estimator = Callable[[Rewards, EstimatorInput, AdvantageConfig], Estimated]


E = TypeVar("E", bound=Estimator)
ESTIMATORS: Builtins[Estimator] = Builtins("advantage.kind")


def reads_anchor(function: E) -> E:
    """Declare an own estimator that reads `EstimatorInput.log_weight_P`: it costs a pass."""
    vars(function)["facts"] = AdvantageKind(reads_anchor=True)
    return function


def facts_of(settings: AdvantageConfig) -> AdvantageKind:
    """Return the declaration of the kind, also of one's own."""
    own = ESTIMATORS.of(settings.kind) if is_own(settings.kind) else None
    return getattr(own, "facts", settings.facts)


@ESTIMATORS("grpo")
def _grpo(rewards: Rewards, given: EstimatorInput, settings: AdvantageConfig) -> Estimated:
    advantage_P = standardised(rewards.reward_P, rewards.group_P, std=settings.std)
    return advantage_P[rewards.trajectory_U], given.baseline


@ESTIMATORS("grpo_process")
def _grpo_process(rewards: Rewards, given: EstimatorInput, settings: AdvantageConfig) -> Estimated:
    return grpo_process(rewards, std=settings.std), given.baseline


@ESTIMATORS("adca")
def _adca(rewards: Rewards, given: EstimatorInput, settings: AdvantageConfig) -> Estimated:
    found_U = adca(rewards, std=settings.std, alpha=given.alpha, length=settings.length)
    return found_U, given.baseline


@ESTIMATORS("rloo")
def _rloo(rewards: Rewards, given: EstimatorInput, settings: AdvantageConfig) -> Estimated:
    return rloo(rewards.reward_P, rewards.group_P)[rewards.trajectory_U], given.baseline


@ESTIMATORS("reinforce")
def _reinforce(rewards: Rewards, given: EstimatorInput, settings: AdvantageConfig) -> Estimated:
    decay = settings.baseline_decay
    advantage_P, baseline = reinforce(rewards.reward_P, given.baseline, decay=decay)
    return advantage_P[rewards.trajectory_U], baseline


@ESTIMATORS("reward_to_go")
def _reward_to_go(rewards: Rewards, given: EstimatorInput, settings: AdvantageConfig) -> Estimated:
    decay, return_U = settings.baseline_decay, returns(rewards, gamma=settings.gamma_turn)
    if not len(return_U):
        return return_U, given.baseline
    return reinforce(return_U, given.baseline, decay=decay)


@ESTIMATORS("opob")
def _opob(rewards: Rewards, given: EstimatorInput, settings: AdvantageConfig) -> Estimated:
    advantage_P = opob(
        rewards.reward_P, rewards.group_P, given.log_weight_P, given.length_P, std=settings.std
    )
    return advantage_P[rewards.trajectory_U], given.baseline


def finite_groups(rewards: Rewards, advantage_U: Array | None = None) -> Array:
    """Return bool[P]: True if all rewards, or advantages, of the trajectory's group are finite."""
    groups = int(rewards.group_P.max()) + 1
    if advantage_U is not None:
        return _missing(advantage_U, rewards.group_U, groups)[rewards.group_P] == 0
    missing_G = _missing(rewards.reward_P, rewards.group_P, groups)
    missing_G += _missing(rewards.turn_reward_U, rewards.group_U, groups)
    return missing_G[rewards.group_P] == 0


def _missing(x: Array, group: Array, groups: int) -> Array:
    """Count the numbers of each group that are not finite."""
    return np.bincount(group, weights=~np.isfinite(x), minlength=groups)


def standardised(x: Array, group: Array, *, std: str) -> Array:
    """Return (x_i - mean_G x) / (std + 1e-6); 0 throughout a group whose x are equal.

    Of outcome rewards this is GRPO's advantage. `std`: `group` (population std of the group),
    `batch` (of all x) or `none` (no division, Dr. GRPO). The rewards 1, 0, 0, 0 of one group give
    1.73, -.58, -.58, -.58 by `group` and .75, -.25, -.25, -.25 by `none`.
    """
    if not len(x):
        return x
    # Sums of weighted terms differ in their last digits: with .1 + .2 beside .3 the division below
    # would make advantages of 1.
    centred = np.where(alike_in_group(x, group), 0.0, x - _group_mean(x, group))
    if std == "none":
        return centred
    if std == "batch":
        return centred / (x.std() + EPSILON)
    assert std == "group", std
    return centred / (np.sqrt(_group_mean(centred**2, group)) + EPSILON)


def opob(
    reward_P: Array, group_P: Array, log_weight_P: Array, length_P: Array, *, std: str
) -> Array:
    """Return A_i = R_i - b, b = Σ_G v R / Σ_G v, v_i = W_i² n_i: the off-policy optimal baseline.

    VCPO, arXiv 2602.17616: there v_i = W_i² |grad log p(trajectory i)|². The squared norm, which
    would take a backward pass for each trajectory, is taken to be proportional to the number n_i
    of its ACTION tokens, as by OPO, arXiv 2505.23585. `std` as in `standardised`. 0 throughout a
    group whose rewards are equal.
    """
    if not len(reward_P):
        return reward_P
    # Products over long trajectories overflow. Only their ratios within a group count.
    largest_G = np.full(int(group_P.max()) + 1, -np.inf)
    np.maximum.at(largest_G, group_P, log_weight_P)
    weight_P = np.exp(2 * (log_weight_P - largest_G[group_P])) * np.maximum(length_P, 1)
    sums_G = np.bincount(group_P, weights=weight_P)
    baseline_G = np.bincount(group_P, weights=weight_P * reward_P) / np.where(sums_G, sums_G, 1.0)
    advantage_P = np.where(alike_in_group(reward_P, group_P), 0.0, reward_P - baseline_G[group_P])
    if std == "none":
        return advantage_P
    if std == "batch":
        return advantage_P / (reward_P.std() + EPSILON)
    assert std == "group", std
    centred_P = reward_P - _group_mean(reward_P, group_P)
    return advantage_P / (np.sqrt(_group_mean(centred_P**2, group_P)) + EPSILON)


def grpo_process(rewards: Rewards, *, std: str) -> Array:
    """Return A_ik = Σ_{j>=k} of turn rewards, standardised over all turns of the group."""
    scores_U = standardised(rewards.turn_reward_U, rewards.group_U, std=std)
    return suffix_sums(scores_U, rewards.turns_P)


def adca(rewards: Rewards, *, std: str, alpha: float, length: str) -> Array:
    """Return A_ik = Σ_{j>=k} alpha z_ij + 1[j = K_i] rho_i, with AgentEvolver's labels.

    z are `label_scores`, rho the standardised outcomes. `length` sqrt divides by sqrt(K_i). Groups
    with `unlabelled` members get rho alone, as by grpo.
    """
    outcome_P = standardised(rewards.reward_P, rewards.group_P, std=std)
    process_U = suffix_sums(label_scores(rewards), rewards.turns_P)
    advantage_U = outcome_P[rewards.trajectory_U] + alpha * process_U
    if length == "none":
        return advantage_U
    assert length == "sqrt", length
    scale_P = np.where(unlabelled(rewards), 1.0, 1 / np.sqrt(np.maximum(rewards.turns_P, 1)))
    return scale_P[rewards.trajectory_U] * advantage_U


def label_scores(rewards: Rewards) -> Array:
    """Return z_ik = (l_ik - mu) / sqrt(v): labels standardised so that members count alike.

    m_i = mean_k l_ik, mu = mean_i m_i, v = mean_i mean_k (l_ik - mu)². Turns without a label are
    left out of m and v and get 0, so do groups with `unlabelled` members or sqrt(v) < 1e-6.
    """
    given_U = rewards.label_U != 0

    def mean_of_means(x_U: Array) -> Array:
        """Return per turn the mean over the group's members of their mean over labelled turns."""
        counts_P = np.bincount(rewards.trajectory_U[given_U], minlength=len(rewards.reward_P))
        sums_P = np.bincount(
            rewards.trajectory_U[given_U], weights=x_U[given_U], minlength=len(counts_P)
        )
        has_P = counts_P > 0  # a member without labelled turns does not count
        sums_G = np.bincount(rewards.group_P, weights=sums_P / np.maximum(counts_P, 1))
        return (sums_G / np.maximum(np.bincount(rewards.group_P, weights=has_P), 1))[
            rewards.group_U
        ]

    centred_U = rewards.label_U - mean_of_means(rewards.label_U)
    sigma_U = np.sqrt(mean_of_means(centred_U**2))
    scored_U = given_U & ~unlabelled(rewards)[rewards.trajectory_U] & (sigma_U >= EPSILON)
    return np.where(scored_U, centred_U / np.maximum(sigma_U, EPSILON), 0.0)


def unlabelled(rewards: Rewards) -> Array:
    """Return bool[P]: True if some member of the trajectory's group has turns and no label."""
    labels_P = rewards.turn_sums(rewards.label_U != 0)
    bare_P = (labels_P == 0) & (rewards.turns_P > 0)
    return np.bincount(rewards.group_P, weights=bare_P)[rewards.group_P] > 0


def unlabelled_groups(rewards: Rewards) -> int:
    """Count the groups that have an `unlabelled` member."""
    return len(np.unique(rewards.group_P[unlabelled(rewards)]))


def alpha_at(step: int, *, alpha: float, alpha_final: float, steps: int) -> float:
    """Return alpha at step `step` (from 0) of a stage of `steps`: a cosine down to alpha_final.

    alpha itself throughout if alpha_final is negative.
    """
    if alpha_final < 0:
        return alpha
    share = min(step / max(steps - 1, 1), 1.0)
    return alpha_final + (alpha - alpha_final) * (1 + math.cos(math.pi * share)) / 2


def rloo(reward_P: Array, group_P: Array) -> Array:
    """Return A_i = R_i - mean of the other members' rewards; 0 where all of a group are equal.

    The rewards 1, 0, 0, 0 of one group give 1, -.33, -.33, -.33.
    """
    if not len(reward_P):
        return reward_P
    size_P = np.bincount(group_P)[group_P]
    others_P = _group_mean(reward_P, group_P) * size_P - reward_P
    advantage_P = reward_P - others_P / np.maximum(size_P - 1, 1)
    return np.where(alike_in_group(reward_P, group_P), 0.0, advantage_P)


def reinforce(reward_P: Array, baseline: float, *, decay: float) -> tuple[Array, float]:
    """Return A = R - b and the next running baseline, decay b + (1 - decay) mean R."""
    return reward_P - baseline, decay * baseline + (1 - decay) * float(reward_P.mean())


def returns(rewards: Rewards, *, gamma: float) -> Array:
    """Return G_k = Σ_{j>=k} gamma^(j-k) r_j at every turn; what the outcome has beyond the sum of
    its turns was given with the last one.

    Of the turns 1, 0, 2 with gamma .5 and an outcome of 3: 1.5, 1, 2.
    """
    missing_P = rewards.reward_P - rewards.turn_sums(rewards.turn_reward_U)
    return_U = rewards.with_last_turn(missing_P)
    for start, end in itertools.pairwise(rewards.turn_start_P.tolist()):
        for turn in range(end - 2, start - 1, -1):
            return_U[turn] += gamma * return_U[turn + 1]
    return return_U


def suffix_sums(x_U: Array, turns_P: Array) -> Array:
    """Return at every turn the sum of x from there to the trajectory's last turn.

    Of 1, 0, 2 in one trajectory: 3, 2, 2.
    """
    present_PK = np.arange(turns_P.max(initial=0)) < turns_P[:, None]
    padded_PK = np.zeros(present_PK.shape)
    padded_PK[present_PK] = x_U
    return padded_PK[:, ::-1].cumsum(1)[:, ::-1][present_PK]


def _group_mean(x: Array, group: Array) -> Array:
    """Return for every number the mean of x over its group."""
    return (np.bincount(group, weights=x) / np.maximum(np.bincount(group), 1))[group]
