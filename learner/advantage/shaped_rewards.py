"""Rewards of a step: taken from a batch, penalised by a KL, shaped by length. Pure.

Formulas: docs/algorithms.md, Advantages.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from evolver_async.config import AdvantageConfig, LossConfig
from evolver_async.schema import Array
from learner.data.batch import Batch, LogProbs
from learner.loss.terms import kl_estimate


@dataclass(frozen=True)
class Rewards:
    """Rewards and labels of P trajectories with U turns in all.

    reward_P float64 (outcomes), group_P int64 (indices of their groups), turn_start_P int64[P+1]
    (the turns of trajectory p are turn_start_P[p]:turn_start_P[p+1]), turn_reward_U float64,
    label_U int8 (+1 GOOD, -1 BAD, 0 unlabelled).
    """

    reward_P: Array
    group_P: Array
    turn_start_P: Array
    turn_reward_U: Array
    label_U: Array

    @property
    def turns_P(self) -> Array:
        return np.diff(self.turn_start_P)

    @property
    def trajectory_U(self) -> Array:
        return np.repeat(np.arange(len(self.reward_P)), self.turns_P)

    @property
    def group_U(self) -> Array:
        return self.group_P[self.trajectory_U]

    def of(self, kept_P: Array) -> "Rewards":
        """Return those of the trajectories `kept_P` alone, bool[P]."""
        kept_U = kept_P[self.trajectory_U]
        return Rewards(
            self.reward_P[kept_P],
            self.group_P[kept_P],
            np.concatenate([[0], np.cumsum(self.turns_P[kept_P])]),
            self.turn_reward_U[kept_U],
            self.label_U[kept_U],
        )

    def turn_sums(self, x_U: Array) -> Array:
        """Return the sum over the turns of every trajectory, float[P]."""
        return np.bincount(self.trajectory_U, weights=x_U, minlength=len(self.reward_P))

    def with_last_turn(self, bonus_P: Array) -> Array:
        """Return the turn rewards with `bonus_P` added to the last turn of each trajectory."""
        turn_reward_U = self.turn_reward_U.copy()
        has_P = self.turns_P > 0
        turn_reward_U[self.turn_start_P[1:][has_P] - 1] += bonus_P[has_P]
        return turn_reward_U

    def penalised(self, kl_N: Array, turn_at_N: Array, coef: float) -> "Rewards":
        """Subtract `coef` times the KL estimates of a turn's, or a trajectory's, ACTION tokens.

        kl_N float[N]; turn_at_N int64[N], the place of the token's turn among the U.
        """
        penalty_U = coef * np.bincount(turn_at_N, weights=kl_N, minlength=len(self.turn_reward_U))
        return replace(
            self,
            reward_P=self.reward_P - self.turn_sums(penalty_U),
            turn_reward_U=self.turn_reward_U - penalty_U,
        )

    def shaped(self, bonus_P: Array) -> "Rewards":
        """Add `bonus_P` to every outcome and to the last turn that led to it."""
        return replace(
            self, reward_P=self.reward_P + bonus_P, turn_reward_U=self.with_last_turn(bonus_P)
        )


def rewards_of(
    batch: Batch, logprobs: LogProbs, loss: LossConfig, advantage: AdvantageConfig
) -> Rewards:
    """Return the rewards that estimators read, less KL and overlong penalties."""
    rewards = Rewards(
        batch.reward_P, batch.group_P, batch.turn_start_P, batch.turn_reward_U, batch.label_U
    )
    if penalises(loss):
        rewards = rewards.penalised(reward_kl(logprobs, loss), batch.turn_at_N, loss.kl_coef)
    if advantage.overlong_limit:
        limit, cache = advantage.overlong_limit, advantage.overlong_cache
        rewards = rewards.shaped(overlong(batch.length_P, limit=limit, cache=cache))
    return rewards


def penalises(loss: LossConfig) -> bool:
    """Return True if a KL is subtracted from the rewards."""
    return loss.kl_place == "reward" and loss.kl_coef > 0


def reward_kl(logprobs: LogProbs, loss: LossConfig) -> Array:
    """Return the KL estimates of ACTION tokens that rewards are penalised by, float32[N].

    The anchor is the present policy; mu may be versions older.
    """
    anchor_N, reference_N = map(torch.from_numpy, (logprobs.anchor_N, logprobs.reference_N))
    return kl_estimate(loss.kl, anchor_N, reference_N).numpy()


def overlong(length_P: Array, *, limit: int, cache: int) -> Array:
    """Return clamp((limit - cache - length) / cache, -1, 0) (DAPO).

    It falls from 0 to -1 over the last `cache` of `limit` tokens; length_P: ACTION tokens of whole
    trajectories.
    """
    return np.clip((limit - cache - length_P) / cache, -1.0, 0.0)
