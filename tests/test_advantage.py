"""The estimators against loops in the notation of the algorithms page, and closed-form cases."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.advantage import advantages, grpo, penalised_rewards, reinforce, rloo, zero_spread

reward_groups = st.lists(
    st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=2, max_size=5),
    min_size=1,
    max_size=5,
)


def flat(groups: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    group_P = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return np.array([reward for group in groups for reward in group]), group_P


def std(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


@given(reward_groups, st.sampled_from(["group", "batch", "none"]))
def test_grpo_matches_the_loop(groups, kind):
    reward_P, group_P = flat(groups)
    expected = []
    for rewards_G in groups:
        for R_i in rewards_G:
            centred = R_i - sum(rewards_G) / len(rewards_G)
            if len(set(rewards_G)) == 1:
                centred = 0.0
            scale = {"group": std(rewards_G), "batch": std(reward_P.tolist()), "none": 1.0}[kind]
            expected.append(centred / (scale + (1e-6 if kind != "none" else 0.0)))
    np.testing.assert_allclose(grpo(reward_P, group_P, std=kind), expected, rtol=1e-6, atol=1e-6)


@given(reward_groups)
def test_rloo_matches_the_loop(groups):
    reward_P, group_P = flat(groups)
    expected = [
        R_i - sum(R_j for j, R_j in enumerate(rewards_G) if j != i) / (len(rewards_G) - 1)
        for rewards_G in groups
        for i, R_i in enumerate(rewards_G)
    ]
    np.testing.assert_allclose(rloo(reward_P, group_P), expected, rtol=1e-9, atol=1e-9)


def test_a_group_without_spread_gets_exactly_zero():
    reward_P, group_P = flat([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0]])
    for kind in ("group", "batch", "none"):
        assert grpo(reward_P, group_P, std=kind)[:3].tolist() == [0, 0, 0]
    assert zero_spread(reward_P, group_P).tolist() == [True] * 3 + [False] * 3


def test_grpo_of_a_coin_is_plus_and_minus_one():
    reward_P, group_P = flat([[0.0, 1.0, 1.0, 0.0]])
    np.testing.assert_allclose(grpo(reward_P, group_P, std="group"), [-1, 1, 1, -1], rtol=1e-5)


def test_reinforce_moves_its_baseline():
    rewards = np.array([1.0, 3.0])
    advantage_P, baseline = reinforce(rewards, 0.5, decay=0.9)
    assert advantage_P.tolist() == [0.5, 2.5]
    assert baseline == pytest.approx(0.9 * 0.5 + 0.1 * 2.0)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce"])
def test_only_reinforce_touches_the_baseline(kind):
    reward_P, group_P = flat([[0.0, 1.0]])
    _, baseline = advantages(
        kind, reward_P, group_P, std="group", baseline=0.25, baseline_decay=0.9
    )
    assert (baseline != 0.25) == (kind == "reinforce")


def test_group_ids_may_be_missing():
    advantage_P = rloo(np.array([0.0, 1.0]), np.array([3, 3]))
    assert advantage_P.tolist() == [-1, 1]


def test_kl_in_the_reward_is_summed_over_the_trajectory():
    rewards = penalised_rewards(
        np.array([1.0, 1.0, 1.0]), np.array([0.5, 0.25, 1.0]), np.array([0, 0, 2]), 0.1
    )
    np.testing.assert_allclose(rewards, [1 - 0.075, 1, 0.9])
