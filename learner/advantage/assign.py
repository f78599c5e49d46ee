"""Who gets credit: the advantages of a batch's tokens, from its rewards and labels."""

import logging

import numpy as np
import torch

from evolver_async.config import Advantage, Loss
from evolver_async.schema import Array
from learner.advantage.critic import fit_metrics
from learner.advantage.gae import (
    WITH_CRITIC,
    Estimate,
    Tokens,
    gae,
    gae_bilevel,
    place_rewards,
    vtrace,
    whitened,
)
from learner.advantage.group_relative import (
    Rewards,
    advantages,
    alpha_at,
    finite_groups,
    unlabelled_groups,
)
from learner.data.batch import Batch
from learner.loss.correction import LOG_RATIO_BOUND
from learner.loss.policy import kl_estimate
from learner.state import State

log = logging.getLogger(__name__)


def penalises(loss: Loss) -> bool:
    """Whether a KL is taken off the rewards."""
    return loss.kl_place == "reward" and loss.kl_coef > 0


def rewards_of(batch: Batch, loss: Loss) -> tuple[Rewards, dict[str, float]]:
    """What estimators read, less the KL where that belongs into the rewards; and its metric."""
    rewards = Rewards(
        batch.reward_P, batch.group_P, batch.turn_start_P, batch.turn_reward_U, batch.label_U
    )
    if not penalises(loss):
        return rewards, {}
    # of the present policy, as the penalty is; mu may be versions older
    kl_N = kl_estimate(
        loss.kl, torch.from_numpy(batch.anchor_N), torch.from_numpy(batch.reference_N)
    ).numpy()
    mean = float(kl_N.mean()) if len(kl_N) else 0.0
    return rewards.penalised(kl_N, batch.turn_at_N, loss.kl_coef), {"loss/kl": mean}


def give_credit(
    batch: Batch, rewards: Rewards, settings: Advantage, state: State, steps: int
) -> tuple[Array, dict[str, float]]:
    """Stores advantages in a batch; groups where one is not finite are left out of it.

    Moves the baseline of `state`, whose stage has `steps` steps. Returns bool[P], who is in, and
    metrics. Rewards that are not finite never meet those of other groups.
    """
    if settings.kind in WITH_CRITIC:
        return _credit_by_critic(batch, rewards, settings, state.take)
    alpha = alpha_at(
        state.take - state.stage_take,
        alpha=settings.alpha,
        alpha_final=settings.alpha_final,
        steps=steps,
    )
    finite_P = finite_groups(rewards)
    advantage_U = np.zeros_like(rewards.turn_reward_U)
    if finite_P.any():
        advantage_U[finite_P[rewards.trajectory_U]], state.baseline = advantages(
            settings.kind,
            rewards.of(finite_P),
            std=settings.std,
            alpha=alpha,
            length=settings.length,
            baseline=state.baseline,
            baseline_decay=settings.baseline_decay,
        )
        finite_P &= finite_groups(rewards, advantage_U)
    _leave_out(batch, ~finite_P, state.take)
    batch.spread_advantages(np.where(finite_P[rewards.trajectory_U], advantage_U, 0.0))
    if settings.kind != "adca":
        return finite_P, {}
    return finite_P, {
        "advantage/alpha": alpha,
        "advantage/unlabelled_groups": float(unlabelled_groups(rewards)),
    }


def _leave_out(batch: Batch, out_P: Array, take: int) -> None:
    if out_P.any():
        groups = np.unique(batch.group_P[out_P])
        log.error("take %d: %d groups have no finite advantage", take, len(groups))
    batch.leave_out(out_P)


def _credit_by_critic(
    batch: Batch, rewards: Rewards, settings: Advantage, take: int
) -> tuple[Array, dict[str, float]]:
    """`give_credit` by a critic's values: advantages, and returns, of single tokens."""
    order_N = np.argsort(batch.turn_at_N, kind="stable")  # as written: contexts may take turns
    with np.errstate(invalid="ignore", over="ignore"):
        estimate = _estimate(batch, rewards, settings, order_N)
    advantage_N, return_N = np.zeros((2, len(order_N)))
    advantage_N[order_N], return_N[order_N] = estimate.advantage_N, estimate.return_N
    group_N = batch.group_P[batch.trajectory_N]
    lost_G = np.bincount(
        group_N,
        weights=~np.isfinite(advantage_N + return_N),
        minlength=int(batch.group_P.max()) + 1,
    )
    finite_P = finite_groups(rewards) & (lost_G[batch.group_P] == 0)
    finite_N = finite_P[batch.trajectory_N]
    _leave_out(batch, ~finite_P, take)
    if not finite_N.any():
        return finite_P, {}
    metrics = fit_metrics(batch.value_N[finite_N], return_N[finite_N])
    if settings.whiten:
        advantage_N[finite_N] = whitened(advantage_N[finite_N])
    batch.advantage_N = np.where(finite_N, advantage_N, 0.0).astype(np.float32)
    batch.return_N = np.where(finite_N, return_N, 0.0).astype(np.float32)
    return finite_P, metrics


def _estimate(batch: Batch, rewards: Rewards, settings: Advantage, order_N: Array) -> Estimate:
    """The estimates for a batch's tokens in the order `order_N`."""
    turn_N = batch.turn_at_N[order_N]
    start_P = np.concatenate([[0], np.cumsum(batch.length_P)])
    after_P = np.zeros(len(batch.length_P))
    if settings.bootstrap:
        row_N = np.repeat(np.arange(len(batch.trajectory_R)), np.diff(batch.action_start_R))
        on_P = batch.truncated_P & (batch.length_P > 0)
        after_P[on_P] = batch.end_value_R[row_N[order_N[start_P[1:][on_P] - 1]]]
    tokens = Tokens(
        reward_N=place_rewards(_turn_rewards(rewards), turn_N, start_P, rewards.turn_start_P),
        value_N=batch.value_N[order_N].astype(np.float64),
        turn_N=turn_N,
        start_P=start_P,
        after_P=after_P,
    )
    gamma, lam = settings.gamma, settings.lam
    if settings.kind == "gae":
        return gae(tokens, gamma=gamma, lam=lam)
    if settings.kind == "gae_bilevel":
        return gae_bilevel(tokens, gamma=gamma, lam=lam, gamma_turn=settings.gamma_turn)
    assert settings.kind == "vtrace", settings.kind
    log_w_N = np.clip(batch.anchor_N - batch.old_N, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return vtrace(
        tokens,
        np.exp(log_w_N[order_N].astype(np.float64)),
        gamma=gamma,
        lam=lam,
        rho_max=settings.rho_max,
        c_max=settings.c_max,
    )


def _turn_rewards(rewards: Rewards) -> Array:
    """The rewards of turns; what the outcome has beyond their sum came with the last one."""
    turn_reward_U = rewards.turn_reward_U.copy()
    sum_P = np.bincount(
        rewards.trajectory_U, weights=turn_reward_U, minlength=len(rewards.reward_P)
    )
    has_P = rewards.turns_P > 0
    turn_reward_U[rewards.turn_start_P[1:][has_P] - 1] += (rewards.reward_P - sum_P)[has_P]
    return turn_reward_U
