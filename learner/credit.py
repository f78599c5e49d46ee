"""Who gets credit: the advantages of a batch's tokens, from its rewards and labels."""

import logging

import numpy as np
import torch

from evolver_async.config import Advantage, Loss
from evolver_async.schema import Array
from learner.advantage import Rewards, advantages, alpha_at, finite_groups, unlabelled_groups
from learner.batch import Batch
from learner.loss import kl_estimate
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
    if not finite_P.all():
        groups = np.unique(batch.group_P[~finite_P])
        log.error("take %d: %d groups have no finite advantage", state.take, len(groups))
    batch.leave_out(~finite_P)
    batch.spread_advantages(np.where(finite_P[rewards.trajectory_U], advantage_U, 0.0))
    if settings.kind != "adca":
        return finite_P, {}
    return finite_P, {
        "advantage/alpha": alpha,
        "advantage/unlabelled_groups": float(unlabelled_groups(rewards)),
    }
