"""Advantages of a batch's tokens, from its rewards, labels and values. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from evolver_async.config import AdvantageConfig
from evolver_async.errors import TrainingError
from evolver_async.extension import Builtins, is_own
from evolver_async.schema import Array
from learner.advantage.gae import (
    Estimate,
    Tokens,
    gae,
    gae_bilevel,
    place_rewards,
    vtrace,
    whitened,
)
from learner.advantage.group_relative import (
    ESTIMATORS,
    EstimatorInput,
    alpha_at,
    facts_of,
    finite_groups,
)
from learner.advantage.shaped_rewards import Rewards
from learner.data.batch import Batch, LogProbs, Values
from learner.loss.ratios import LOG_RATIO_BOUND


@dataclass(frozen=True)
class Advantages:
    """Advantages of the N ACTION tokens of a batch, and the returns that a critic learns.

    advantage_N float32, return_N, 0 without a critic; finite_P bool: False for trajectories of
    groups with a reward or an advantage that is not finite, which do not train; `left_out`: the
    indices of these groups. `baseline`: the running baseline for the next step. alpha: the weight
    of labels, 0 with a critic; own: numbers of an estimator's own.
    """

    advantage_N: Array
    return_N: Array
    finite_P: Array
    left_out: set[int]
    baseline: float
    alpha: float = 0.0
    own: dict[str, float] = field(default_factory=dict)


def assign(
    batch: Batch,
    logprobs: LogProbs,
    values: Values | None,
    rewards: Rewards,
    settings: AdvantageConfig,
    *,
    scale: float,
    baseline: float,
    step: int,
    steps: int,
) -> Advantages:
    """Estimate the advantages of a batch's tokens, times `scale`.

    `values`: None for the group-relative estimators. step: of the stage, which has `steps`.
    Rewards that are not finite never meet those of other groups.
    """
    if values is None:
        alpha = alpha_at(step, alpha=settings.alpha, alpha_final=settings.alpha_final, steps=steps)
        log_w_N = np.clip(logprobs.anchor_N - logprobs.old_N, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        if not facts_of(settings).reads_anchor:
            log_w_N = np.zeros_like(log_w_N)
        log_weight_P = np.bincount(
            batch.trajectory_N, weights=log_w_N, minlength=len(batch.length_P)
        )
        log_weight_P = np.clip(log_weight_P, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        given = EstimatorInput(
            alpha, baseline, log_weight_P, batch.length_P, batch.lag_P, batch.lag_U
        )
        advantage_N, finite_P, baseline = _by_group(batch, rewards, settings, given)
        return_N, own = np.zeros_like(batch.mu_N), given.metrics
    else:
        advantage_N, return_N, finite_P = _by_critic(batch, logprobs, values, rewards, settings)
        alpha, own = 0.0, {}
    left_out = set(batch.group_P[~finite_P].tolist())
    advantage_N = advantage_N.astype(np.float32) * scale
    return Advantages(advantage_N, return_N, finite_P, left_out, baseline, alpha, own)


def _by_group(
    batch: Batch, rewards: Rewards, settings: AdvantageConfig, given: EstimatorInput
) -> tuple[Array, Array, float]:
    """Give every ACTION token the advantage of its turn, among the peers of its trajectory.

    Returns advantage_N, finite_P and the next running baseline.
    """
    finite_P, baseline = finite_groups(rewards), given.baseline
    advantage_U = np.zeros_like(rewards.turn_reward_U)
    compared_P = finite_P & ~batch.written_P  # recorded conversations have no outcome
    if compared_P.any():
        compared = replace(rewards, group_P=batch.peer_P).of(compared_P)
        compared_U = compared_P[rewards.trajectory_U]
        estimate_U, baseline = _estimated(compared, given.of(compared_P, compared_U), settings)
        advantage_U[compared_U] = estimate_U
        finite_P &= finite_groups(rewards, advantage_U)
    advantage_U = np.where(finite_P[rewards.trajectory_U], advantage_U, 0.0)
    return advantage_U[batch.turn_at_N], finite_P, baseline


def _estimated(
    rewards: Rewards, given: EstimatorInput, settings: AdvantageConfig
) -> tuple[Array, float]:
    """Return the advantages of the turns and the next running baseline.

    Raises TrainingError, which names the key, if an own function returns anything else.
    """
    found = ESTIMATORS.of(settings.kind)(rewards, given, settings)
    if not is_own(settings.kind):
        return found
    wanted_U = rewards.turn_reward_U.shape
    try:
        estimate_U, baseline = found
        estimate_U, baseline = np.asarray(estimate_U, np.float64), float(baseline)
        problem = "" if estimate_U.shape == wanted_U else f"advantages of shape {estimate_U.shape}"
        given.metrics.update({str(name): float(one) for name, one in given.metrics.items()})
    except (TypeError, ValueError) as error:
        problem = f"{type(found).__name__} ({error})"
    if problem:
        wanted = f"advantages of shape {wanted_U}, one a turn, and the baseline"
        raise TrainingError(f"advantage.kind: {settings.kind} returned {problem}, not {wanted}")
    return estimate_U, baseline


def _by_critic(
    batch: Batch,
    logprobs: LogProbs,
    values: Values,
    rewards: Rewards,
    settings: AdvantageConfig,
) -> tuple[Array, Array, Array]:
    """Return advantage_N and return_N of single tokens by a critic's values, and finite_P."""
    order_N = np.argsort(batch.turn_at_N, kind="stable")  # as written: contexts may take turns
    with np.errstate(invalid="ignore", over="ignore"):
        estimate = _estimate(batch, logprobs, values, rewards, settings, order_N)
    advantage_N, return_N = np.zeros((2, len(order_N)))
    advantage_N[order_N], return_N[order_N] = estimate.advantage_N, estimate.return_N
    lost_G = np.bincount(
        batch.group_P[batch.trajectory_N],
        weights=~np.isfinite(advantage_N + return_N),
        minlength=int(batch.group_P.max()) + 1,
    )
    finite_P = finite_groups(rewards) & (lost_G[batch.group_P] == 0)
    finite_N, written_N = (of_P[batch.trajectory_N] for of_P in (finite_P, batch.written_P))
    # recorded conversations have no outcome: their values are to stay
    return_N = np.where(written_N, values.value_N, return_N)
    valued_N = finite_N & ~written_N
    if settings.whiten and valued_N.any():
        advantage_N[valued_N] = whitened(advantage_N[valued_N])
    return np.where(valued_N, advantage_N, 0.0), np.where(finite_N, return_N, 0.0), finite_P


def _estimate(
    batch: Batch,
    logprobs: LogProbs,
    values: Values,
    rewards: Rewards,
    settings: AdvantageConfig,
    order_N: Array,
) -> Estimate:
    """Estimate for a batch's tokens in the order `order_N`."""
    turn_N = batch.turn_at_N[order_N]
    start_P = np.concatenate([[0], np.cumsum(batch.length_P)])
    after_P = np.zeros(len(batch.length_P))
    if settings.bootstrap:
        row_N = np.repeat(np.arange(len(batch.trajectory_R)), np.diff(batch.action_start_R))
        on_P = batch.truncated_P & (batch.length_P > 0)
        after_P[on_P] = values.end_value_R[row_N[order_N[start_P[1:][on_P] - 1]]]
    # What the outcome has beyond the sum of its turns was given with the last one.
    missing_P = rewards.reward_P - rewards.turn_sums(rewards.turn_reward_U)
    turn_reward_U = rewards.with_last_turn(missing_P)
    tokens = Tokens(
        reward_N=place_rewards(turn_reward_U, turn_N, start_P, rewards.turn_start_P),
        value_N=values.value_N[order_N].astype(np.float64),
        turn_N=turn_N,
        start_P=start_P,
        after_P=after_P,
    )
    log_w_N = np.clip(logprobs.anchor_N - logprobs.old_N, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    w_N = np.exp(log_w_N[order_N].astype(np.float64))
    return BY_CRITIC[settings.kind](tokens, w_N, settings)


ByCritic = Callable[[Tokens, Array, AdvantageConfig], Estimate]
BY_CRITIC: Builtins[ByCritic] = Builtins("advantage.kind")
BY_CRITIC("gae")(lambda tokens, w_N, settings: gae(tokens, gamma=settings.gamma, lam=settings.lam))
BY_CRITIC("gae_bilevel")(
    lambda tokens, w_N, settings: gae_bilevel(
        tokens, gamma=settings.gamma, lam=settings.lam, gamma_turn=settings.gamma_turn
    )
)
BY_CRITIC("vtrace")(
    lambda tokens, w_N, settings: vtrace(
        tokens,
        w_N,
        gamma=settings.gamma,
        lam=settings.lam,
        rho_max=settings.rho_max,
        c_max=settings.c_max,
    )
)


def reliance(batch: Batch, logprobs: LogProbs) -> Array | None:
    """Return max(0, mean_t(guided_t - bare_t)) of log-probs by trajectory, 0 if not stripped.

    HiLL, arXiv 2604.00698, measures how much a hinted answer leans on its hint by the mean over its
    tokens of log p(token | hint) - log p(token), and weights the reward of the hint's author by
    exp(-reliance / 0.3). Both are of the policy that the step begins with. float64[P]; None if the
    contexts that stripped trajectories were sampled in have no log-probs.
    """
    if logprobs.sampled_N is None:
        return None
    lost_N = np.where(batch.stripped_N, logprobs.sampled_N - logprobs.anchor_N, 0.0)
    sums_P = np.bincount(batch.trajectory_N, weights=lost_N, minlength=len(batch.length_P))
    return np.maximum(0.0, sums_P / np.maximum(batch.length_P, 1))


def weighted(
    advantages: Advantages, batch: Batch, logprobs: LogProbs, *, coef: float
) -> Advantages:
    """Multiply the advantages of stripped trajectories by exp(-coef · reliance).

    The answer itself is weighted: what the policy could nearly have written without experience
    trains the more. `coef` > 0 needs the log-probs of the contexts that it was sampled in.
    """
    if not coef or (reliance_P := reliance(batch, logprobs)) is None:
        return advantages
    weight_N = np.exp(-coef * reliance_P)[batch.trajectory_N].astype(np.float32)
    return replace(advantages, advantage_N=advantages.advantage_N * weight_N)
