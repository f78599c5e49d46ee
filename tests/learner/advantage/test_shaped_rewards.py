"""Rewards: penalties by length, against the ramp written out in cases."""

import numpy as np
import pytest
from collated_groups import collated, make_groups
from hypothesis import given
from hypothesis import strategies as st

from evolver_async.config import AdvantageConfig, LossConfig
from learner.advantage.shaped_rewards import Rewards, overlong, rewards_of
from learner.data.batch import LogProbs


def make_rewards() -> Rewards:
    """Three trajectories of 2, 0 and 1 turns."""
    return Rewards(
        reward_P=np.array([1.0, 0.5, 0.0]),
        group_P=np.array([0, 0, 1]),
        turn_start_P=np.array([0, 2, 2, 3]),
        turn_reward_U=np.array([0.25, 0.75, 0.0]),
        label_U=np.zeros(3, np.int8),
    )


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 200))
def test_the_ramp_goes_from_nothing_to_one_over_the_cache(length, limit, cache):
    cache = min(cache, limit)
    (found,) = overlong(np.array([length]), limit=limit, cache=cache)
    if length <= limit - cache:
        assert found == 0
    elif length >= limit:
        assert found == -1
    else:
        assert found == -(length - (limit - cache)) / cache


def test_the_ramp_at_dapos_own_numbers():
    lengths = np.array([16384, 16385, 18432, 20480, 30000])
    found = overlong(lengths, limit=20480, cache=4096)
    assert found.tolist() == [0, -1 / 4096, -0.5, -1, -1]


def test_a_bonus_goes_to_the_outcome_and_to_the_last_turn():
    before = make_rewards()
    after = before.shaped(np.array([-0.5, -0.25, -1.0]))
    assert after.reward_P.tolist() == [0.5, 0.25, -1.0]
    assert after.turn_reward_U.tolist() == [0.25, 0.25, -1.0]
    assert before.turn_reward_U.tolist() == [0.25, 0.75, 0.0]  # untouched


def test_a_kl_is_subtracted_from_every_turn_and_from_the_outcome_of_its_trajectory():
    before = make_rewards()
    after = before.penalised(np.array([0.5, 1.0, 2.0, 4.0]), np.array([0, 1, 1, 2]), 0.1)
    assert after.reward_P == pytest.approx([1.0 - 0.35, 0.5, -0.4])
    assert after.turn_reward_U == pytest.approx([0.25 - 0.05, 0.75 - 0.3, -0.4])
    assert before.turn_reward_U.tolist() == [0.25, 0.75, 0.0]  # untouched


def test_lengths_within_the_limit_change_nothing():
    batch = collated(make_groups(0, 3, 2))
    logprobs = LogProbs(batch.mu_N, batch.mu_N, batch.mu_N)
    lengths = batch.length_P
    assert lengths.max() > 2
    usual = rewards_of(batch, logprobs, LossConfig(), AdvantageConfig())
    assert usual.reward_P is batch.reward_P
    settings = AdvantageConfig(overlong_limit=100, overlong_cache=10)
    same = rewards_of(batch, logprobs, LossConfig(), settings)
    assert same.reward_P.tolist() == batch.reward_P.tolist()
    settings = AdvantageConfig(overlong_limit=4, overlong_cache=2)
    shorter = rewards_of(batch, logprobs, LossConfig(), settings)
    lost_P = np.clip((4 - 2 - lengths) / 2, -1, 0)
    assert shorter.reward_P.tolist() == (batch.reward_P + lost_P).tolist()
