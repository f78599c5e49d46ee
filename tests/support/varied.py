"""Rows whose lengths vary as much as their mean: what padding costs most."""

import numpy as np

from learner.data.batch import Batch


def varied(count: int, mean: int, vocabulary: int, *, seed: int = 0) -> Batch:
    """`count` trajectories of one row, in random order; the last three quarters of each train.

    Lengths are the quantiles of an exponential distribution, whose coefficient of variation is 1
    (a little less for few rows, which hold no extremes), but never below 4.
    """
    rng = np.random.Generator(np.random.Philox(key=seed))
    quantiles = -np.log1p(-(np.arange(count) + 0.5) / count)
    length_R = rng.permutation(np.maximum(4, np.round(mean * quantiles))).astype(np.int64)
    start_R = np.concatenate([[0], np.cumsum(length_R)])
    place = np.arange(start_R[-1]) - np.repeat(start_R[:-1], length_R)
    action = place >= np.repeat(length_R, length_R) // 4
    action_R = np.add.reduceat(action, start_R[:-1]).astype(np.int64)
    trajectory_N = np.repeat(np.arange(count), action_R)
    tokens_N = len(trajectory_N)
    return Batch(
        tokens=rng.integers(0, vocabulary, start_R[-1], np.int32),
        action=action,
        row_start_R=start_R,
        action_start_R=np.concatenate([[0], np.cumsum(action_R)]),
        trajectory_R=np.arange(count),
        mu_N=np.full(tokens_N, -np.log(vocabulary), np.float32),
        lag_N=np.zeros(tokens_N, np.int64),
        abandoned_N=np.zeros(tokens_N, bool),
        swapped_N=np.zeros(tokens_N, bool),
        turn_N=np.zeros(tokens_N, np.int64),
        trajectory_N=trajectory_N,
        group_P=np.arange(count),
        peer_P=np.arange(count),
        reward_P=np.zeros(count),
        length_P=action_R,
        lag_P=np.zeros(count, np.int64),
        written_P=np.zeros(count, bool),
        guided_P=np.zeros(count, bool),
        copied_P=np.zeros(count, bool),
        stripped_P=np.zeros(count, bool),
        truncated_P=np.zeros(count, bool),
        overlong_P=np.zeros(count, bool),
        turn_start_P=np.arange(count + 1),
        turn_reward_U=np.zeros(count),
        label_U=np.zeros(count, np.int8),
    )
