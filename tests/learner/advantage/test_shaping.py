"""What length takes off rewards, against the ramp said in cases."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from learner.advantage.group_relative import Rewards
from learner.advantage.shaping import overlong, shaped, without_overlong


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
    after = shaped(before, np.array([-0.5, -0.25, -1.0]))
    assert after.reward_P.tolist() == [0.5, 0.25, -1.0]
    assert after.turn_reward_U.tolist() == [0.25, 0.25, -1.0]
    assert before.turn_reward_U.tolist() == [0.25, 0.75, 0.0]  # untouched


def test_lengths_within_the_limit_change_nothing_and_no_limit_no_object():
    rewards, lengths = make_rewards(), np.array([3, 10, 8])
    assert without_overlong(rewards, lengths, limit=0, cache=0) == (rewards, {})
    same, metrics = without_overlong(rewards, lengths, limit=100, cache=10)
    assert same.reward_P.tolist() == rewards.reward_P.tolist()
    assert metrics == {"overlong/share": 0.0, "overlong/mean": 0.0}
    shorter, metrics = without_overlong(rewards, lengths, limit=10, cache=4)
    assert shorter.reward_P.tolist() == [1.0, -0.5, -0.5]
    assert metrics == {"overlong/share": 2 / 3, "overlong/mean": -0.5}
