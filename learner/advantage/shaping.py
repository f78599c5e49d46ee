"""Shaping: what the length of a trajectory takes off its reward. Pure; formulas: algorithms §8."""

from dataclasses import replace

import numpy as np

from evolver_async.schema import Array
from learner.advantage.group_relative import Rewards


def overlong(length_P: Array, *, limit: int, cache: int) -> Array:
    """clamp((limit - cache - length) / cache, -1, 0) (DAPO): from 0 down to -1 over the last
    `cache` of `limit` tokens; length_P ACTION tokens of whole trajectories."""
    return np.clip((limit - cache - length_P) / cache, -1.0, 0.0)


def shaped(rewards: Rewards, bonus_P: Array) -> Rewards:
    """The rewards with `bonus_P` added to every outcome, and to the last turn that led there."""
    turn_reward_U = rewards.turn_reward_U.copy()
    has_P = rewards.turns_P > 0
    turn_reward_U[rewards.turn_start_P[1:][has_P] - 1] += bonus_P[has_P]
    return replace(rewards, reward_P=rewards.reward_P + bonus_P, turn_reward_U=turn_reward_U)


def without_overlong(
    rewards: Rewards, length_P: Array, *, limit: int, cache: int
) -> tuple[Rewards, dict[str, float]]:
    """The rewards less what trajectories of `length_P` ACTION tokens lose by their length.

    And its metrics: the share that loses something, the mean over all. Limit 0: nobody does.
    """
    if not limit:
        return rewards, {}
    bonus_P = overlong(length_P, limit=limit, cache=cache)
    metrics = {
        "overlong/share": float((bonus_P < 0).mean()),
        "overlong/mean": float(bonus_P.mean()),
    }
    return shaped(rewards, bonus_P), metrics
