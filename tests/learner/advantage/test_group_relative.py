"""The estimators against loops in the notation of the algorithms page, and closed-form cases."""

import math

import numpy as np
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import WITHOUT_CRITIC, Groups, Seen, falls_back, mean

from evolver_async.config import AdvantageConfig
from evolver_async.rewards import alike_in_group
from learner.advantage.group_relative import (
    ESTIMATORS,
    EstimatorInput,
    adca,
    alpha_at,
    finite_groups,
    grpo_process,
    label_scores,
    opob,
    reinforce,
    rloo,
    standardised,
    suffix_sums,
    unlabelled,
    unlabelled_groups,
)
from learner.advantage.shaped_rewards import Rewards

STDS = ["group", "batch", "none"]
number = st.floats(-10, 10, allow_subnormal=False).map(lambda x: round(x, 3))
# a member: its outcome, and a (reward, label) of every turn
turn = st.tuples(number, st.sampled_from([1, -1, 1, -1, 0]))
member = st.tuples(number, st.lists(turn, max_size=5))
member_groups = st.lists(st.lists(member, min_size=1, max_size=4), min_size=1, max_size=4)


def flat(groups: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    group_P = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return np.array([reward for group in groups for reward in group]), group_P


def rewards_of(groups: Groups) -> Rewards:
    members = [one for group in groups for one in group]
    return Rewards(
        reward_P=np.array([reward for reward, _ in members]),
        group_P=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        turn_start_P=np.cumsum([0, *(len(turns) for _, turns in members)]),
        turn_reward_U=np.array([r for _, turns in members for r, _ in turns], np.float64),
        label_U=np.array([label for _, turns in members for _, label in turns], np.int8),
    )


@settings(max_examples=examples(100))
@pytest.mark.parametrize("kind", WITHOUT_CRITIC)
@given(
    member_groups,
    st.sampled_from(STDS),
    st.floats(0, 2),
    st.sampled_from(["none", "sqrt"]),
    st.integers(0, 10**6),
)
def test_every_estimator_matches_the_loop(kind, groups, std, alpha, length, seed):
    settings_ = AdvantageConfig(kind=kind, std=std, length=length)
    rewards, rng = rewards_of(groups), np.random.default_rng(seed)
    members = len(rewards.reward_P)
    log_weight_P, length_P = rng.normal(size=members), rng.integers(0, 9, members)
    lags = np.zeros(members, int), np.zeros(len(rewards.label_U), int)
    given_ = EstimatorInput(alpha, 0.25, log_weight_P, length_P, *lags)
    found_U, baseline = ESTIMATORS.of(settings_.kind)(rewards, given_, settings_)
    seen = Seen(alpha, 0.25, log_weight_P.tolist(), length_P.tolist())
    expected = WITHOUT_CRITIC[kind](groups, seen, settings_)
    np.testing.assert_allclose(found_U, expected, rtol=1e-6, atol=1e-6)
    assert kind in ("reinforce", "reward_to_go") or baseline == 0.25
    assert unlabelled_groups(rewards) == sum(falls_back(group) for group in groups)


@given(member_groups)
def test_label_scores_have_mean_zero_and_variance_one_by_member(groups):
    rewards = rewards_of(groups)
    z_U = label_scores(rewards)
    labels_P = np.bincount(
        rewards.trajectory_U, weights=rewards.label_U != 0, minlength=len(rewards.reward_P)
    )
    for g in range(len(groups)):
        own = [
            z_U[(rewards.trajectory_U == p) & (rewards.label_U != 0)]
            for p in np.flatnonzero((rewards.group_P == g) & (labels_P > 0))
        ]
        if own and any(abs(z_i).any() for z_i in own):
            assert mean([float(z_i.mean()) for z_i in own]) == pytest.approx(0, abs=1e-9)
            assert mean([float((z_i**2).mean()) for z_i in own]) == pytest.approx(1)


def test_members_whose_labels_agree_on_average_are_not_blown_up():
    """The paper's Eq. 18 divides by the spread of the m_i, which is 0 here."""
    group = [(0.0, [(0.0, 1), (0.0, -1)]), (1.0, [(0.0, -1), (0.0, 1)])]
    np.testing.assert_allclose(label_scores(rewards_of([group])), [1, -1, -1, 1])


def test_adca_of_a_small_group_by_hand():
    """One member succeeds with labels + -, one fails with +: mu = 1/2, v = 3/4."""
    groups = [[(1.0, [(0.0, 1), (0.0, -1)]), (0.0, [(0.0, 1)])]]
    good, bad = 0.5 / math.sqrt(0.75), -1.5 / math.sqrt(0.75)
    found = adca(rewards_of(groups), std="group", alpha=0.1, length="none")
    expected = [1 + 0.1 * (good + bad), 1 + 0.1 * bad, -1 + 0.1 * good]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@given(member_groups, st.integers(0, 100), st.sampled_from(["none", "sqrt"]))
def test_one_unjudged_trajectory_makes_its_group_grpo_and_no_other(groups, pick, length):
    """A judge outage: the group's advantages are those of grpo, exactly."""
    g = pick % len(groups)
    groups = [[*group] for group in groups]
    groups[g].append((0.5, [(0.0, 0), (0.0, 0)]))
    rewards = rewards_of(groups)
    outage_U = rewards.group_U == g
    found = adca(rewards, std="group", alpha=0.7, length=length)
    grpo = standardised(rewards.reward_P, rewards.group_P, std="group")[rewards.trajectory_U]
    assert (found[outage_U] == grpo[outage_U]).all()
    assert unlabelled(rewards)[rewards.group_P == g].all()
    judged = [group for i, group in enumerate(groups) if i != g]
    if judged:
        alone = adca(rewards_of(judged), std="group", alpha=0.7, length=length)
        np.testing.assert_allclose(found[~outage_U], alone, rtol=1e-12, atol=1e-12)


def test_uniform_labels_and_a_constant_outcome_teach_nothing():
    groups = [[(0.5, [(0.0, 1)] * 3), (0.5, [(0.0, 1)])]]
    assert not adca(rewards_of(groups), std="group", alpha=0.1, length="none").any()


outcome = st.sampled_from([0.0, 1.0, -0.5])  # of every member: failed or succeeded throughout
labels = st.lists(st.sampled_from([1, -1]), min_size=1, max_size=5)


@given(outcome, st.lists(labels, min_size=2, max_size=6), st.floats(0.05, 0.5))
def test_a_group_with_one_outcome_learns_from_its_labels_alone(R, r, alpha):
    """AgentEvolver's fusion in the paper's notation: r_ik = ±1 by the judge, z of r over the steps
    of the group with equal weight of trajectories, rho_i = 0 as the R_i have no spread, c_ik =
    alpha z_ik, A_ik = sum of c_ij over j >= k. The labels are those of the judge, also where all
    members failed: nothing makes them BAD, so that a GOOD step is still reinforced."""
    N = len(r)
    m = [mean(r_i) for r_i in r]
    mu = mean(m)
    v = sum(mean([(r_ik - mu) ** 2 for r_ik in r_i]) for r_i in r) / N
    expected = []
    for r_i in r:
        c_i = [alpha * (r_ik - mu) / math.sqrt(v) if v > 1e-12 else 0.0 for r_ik in r_i]
        expected += [sum(c_i[k:]) for k in range(len(c_i))]
    rewards = rewards_of([[(R, [(0.0, r_ik) for r_ik in r_i]) for r_i in r]])
    found = adca(rewards, std="group", alpha=alpha, length="none")
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    last = np.cumsum([len(r_i) for r_i in r]) - 1  # A of a last turn is its own c
    signs = np.sign(np.round(found[last], 9))
    if v > 1e-12:
        assert (signs == [r_i[-1] for r_i in r]).all(), "GOOD is raised and BAD lowered"
    else:
        assert not found.any(), "labels that are all the same rank no step"
    grpo = standardised(rewards.reward_P, rewards.group_P, std="group")
    assert not grpo.any(), "the outcome alone would teach nothing"


def test_failed_and_succeeded_throughout_are_the_same_but_for_the_judge():
    """By hand, labels + -, -, -; and a group that is BAD throughout."""
    found = {}
    for R in (0.0, 1.0):
        group = [(R, [(0.0, 1), (0.0, -1)]), (R, [(0.0, -1)]), (R, [(0.0, -1)])]
        found[R] = adca(rewards_of([group]), std="group", alpha=0.2, length="none")
    mu = mean([0.0, -1.0, -1.0])
    v = mean([mean([(1 - mu) ** 2, (-1 - mu) ** 2]), (-1 - mu) ** 2, (-1 - mu) ** 2])
    good, bad = 0.2 * (1 - mu) / math.sqrt(v), 0.2 * (-1 - mu) / math.sqrt(v)
    np.testing.assert_allclose(found[0.0], [good + bad, bad, bad, bad], rtol=1e-9)
    assert found[0.0].tolist() == found[1.0].tolist()
    unequal = [[(0.0, [(0.0, -1)] * 3), (0.0, [(0.0, -1)])]]
    assert not adca(rewards_of(unequal), std="group", alpha=0.2, length="none").any()


def test_labels_teach_where_the_outcome_is_constant():
    groups = [[(0.0, [(0.0, 1)]), (0.0, [(0.0, -1)])]]
    found = adca(rewards_of(groups), std="group", alpha=0.1, length="none")
    np.testing.assert_allclose(found, [0.1, -0.1])


def test_alpha_falls_along_a_cosine_to_its_end():
    def at(step: int, alpha_final: float, steps: int = 11) -> float:
        return alpha_at(step, alpha=0.2, alpha_final=alpha_final, steps=steps)

    assert [at(step, -1.0) for step in (0, 5, 10)] == [0.2] * 3
    assert at(0, 0.0) == 0.2 and at(10, 0.0) == at(50, 0.0) == pytest.approx(0.0)
    assert at(5, 0.1) == pytest.approx(0.15)
    assert at(2, 0.0) == pytest.approx(0.1 * (1 + math.cos(math.pi * 0.2)))
    assert at(0, 0.0, steps=1) == 0.2


@given(st.lists(st.lists(number, max_size=6), min_size=1, max_size=6))
def test_suffix_sums_stay_within_their_trajectory(turns):
    expected = [sum(xs[k:]) for xs in turns for k in range(len(xs))]
    x_U = np.array([x for xs in turns for x in xs])
    found = suffix_sums(x_U, np.array([len(xs) for xs in turns]))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-9)


def test_rloo_gives_a_member_without_others_nothing():
    assert rloo(np.array([2.0, 0.0, 1.0]), np.array([0, 3, 3])).tolist() == [0, -1, 1]


def test_a_group_without_spread_gets_exactly_zero():
    reward_P, group_P = flat([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0]])
    for kind in STDS:
        assert standardised(reward_P, group_P, std=kind)[:3].tolist() == [0, 0, 0]
    assert alike_in_group(reward_P, group_P).tolist() == [True] * 3 + [False] * 3


def test_grpo_of_a_coin_is_plus_and_minus_one():
    reward_P, group_P = flat([[0.0, 1.0, 1.0, 0.0]])
    found = standardised(reward_P, group_P, std="group")
    np.testing.assert_allclose(found, [-1, 1, 1, -1], rtol=1e-5)


def test_reinforce_moves_its_baseline():
    rewards = np.array([1.0, 3.0])
    advantage_P, baseline = reinforce(rewards, 0.5, decay=0.9)
    assert advantage_P.tolist() == [0.5, 2.5]
    assert baseline == pytest.approx(0.9 * 0.5 + 0.1 * 2.0)


def test_reward_to_go_discounts_by_turns_and_moves_the_baseline_by_the_mean_return():
    """The outcome has .5 more than its turns: it was given with the last one."""
    rewards = rewards_of([[(3.5, [(1.0, 0), (0.0, 0), (2.0, 0)]), (1.0, [(1.0, 0)])]])
    settings_ = AdvantageConfig(kind="reward_to_go", gamma_turn=0.5, baseline_decay=0.9)
    given_ = EstimatorInput(0.0, 1.0, *(np.zeros(2),) * 3, np.zeros(4))
    found_U, baseline = ESTIMATORS.of("reward_to_go")(rewards, given_, settings_)
    np.testing.assert_allclose(found_U, [0.625, 0.25, 1.5, 0.0])
    assert baseline == pytest.approx(0.9 + 0.1 * (1.625 + 1.25 + 2.5 + 1.0) / 4)


@pytest.mark.parametrize("std", STDS)
def test_grpo_process_of_single_turns_is_grpo(std: str) -> None:
    groups: Groups = [
        [(r, [(r, 0)]) for r in rewards] for rewards in ([1.0, 0.0, -0.1], [1.0, 0.0])
    ]
    rewards = rewards_of(groups)
    outcome_P = standardised(rewards.reward_P, rewards.group_P, std=std)
    np.testing.assert_array_equal(grpo_process(rewards, std=std), outcome_P)


def test_group_ids_may_be_missing():
    advantage_P = rloo(np.array([0.0, 1.0]), np.array([3, 3]))
    assert advantage_P.tolist() == [-1, 1]


@given(member_groups, st.integers(0, 10**6))
def test_leaving_members_out_leaves_the_turns_of_the_others(groups, seed):
    rng = np.random.default_rng(seed)
    rewards = rewards_of(groups)
    kept_P = rng.random(len(rewards.reward_P)) < 0.5
    found = rewards.of(kept_P)
    members = [one for group in groups for one in group]
    kept = [one for one, keep in zip(members, kept_P, strict=True) if keep]
    expected = rewards_of([kept])
    for name in ("reward_P", "turn_start_P", "turn_reward_U", "label_U"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
    assert found.group_P.tolist() == rewards.group_P[kept_P].tolist()


def test_one_number_that_is_not_finite_marks_its_whole_group():
    groups = [[(0.0, [(0.0, 1)]), (1.0, [])], [(0.0, [(math.inf, 1)]), (1.0, [(0.0, 1)])]]
    assert finite_groups(rewards_of(groups)).tolist() == [True, True, False, False]
    groups[1][0] = (math.nan, [(0.0, 1)])
    assert finite_groups(rewards_of(groups)).tolist() == [True, True, False, False]
    groups[1][0] = (0.0, [(0.0, 1)])
    rewards = rewards_of(groups)
    assert finite_groups(rewards).all()
    found = finite_groups(rewards, np.array([math.nan, 0.0, 0.0]))
    assert found.tolist() == [False, False, True, True]


def test_kl_is_taken_off_the_turn_that_it_belongs_to_and_off_the_outcome():
    rewards = rewards_of([[(1.0, [(0.0, 0), (0.5, 0)]), (1.0, []), (1.0, [(1.0, 0)])]])
    found = rewards.penalised(np.array([1.0, 0.5, 0.25, 1.0]), np.array([0, 0, 1, 2]), 0.1)
    np.testing.assert_allclose(found.reward_P, [1 - 0.175, 1, 0.9])
    np.testing.assert_allclose(found.turn_reward_U, [-0.15, 0.475, 0.9])


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-3, 3), st.integers(1, 9)),
        min_size=2,
        max_size=12,
    ),
    st.sampled_from(["group", "none"]),
)
def test_opob_is_the_baseline_of_least_variance_of_the_weighted_gradient(members, std):
    """b minimises Σ W² n (R - b)²: the variance of W (R - b) times a gradient of squared norm n."""
    reward, log_weight, length = map(np.array, zip(*members, strict=True))
    found = opob(reward, np.zeros(len(members), int), log_weight, length, std=std)
    if len(set(reward)) == 1:
        assert not found.any()
        return
    weight = np.exp(2 * log_weight) * length
    baseline = (weight * reward).sum() / weight.sum()
    scale = reward.std() + 1e-6 if std == "group" else 1.0
    np.testing.assert_allclose(found * scale, reward - baseline, atol=1e-9)

    def variance(b: float) -> float:
        return float((weight * (reward - b) ** 2).sum())

    assert variance(baseline) <= min(variance(baseline + 0.01), variance(baseline - 0.01)) + 1e-12


def test_opob_without_lag_and_with_equal_lengths_is_the_group_mean():
    reward, group = np.array([0.0, 1.0, 1.0, 0.0, 3.0]), np.array([0, 0, 0, 1, 1])
    found = opob(reward, group, np.zeros(5), np.full(5, 7), std="none")
    np.testing.assert_allclose(found, standardised(reward, group, std="none"))


@pytest.mark.parametrize("kind", ["grpo", "grpo_process", "rloo", "opob"])
@pytest.mark.parametrize("std", STDS)
def test_sums_that_differ_by_rounding_alone_have_no_advantage(kind, std):
    reward_P = np.array([0.1 + 0.2, 0.3, 0.3, 1.0])
    group_P, zeros_P = np.array([0, 0, 1, 1]), np.zeros(4)
    rewards = Rewards(reward_P, group_P, np.arange(5), reward_P, zeros_P.astype(np.int8))
    given_ = EstimatorInput(0.0, 0.0, zeros_P, zeros_P + 1, zeros_P, zeros_P)
    settings_ = AdvantageConfig(kind=kind, std=std)
    found_U, _ = ESTIMATORS.of(settings_.kind)(rewards, given_, settings_)
    assert found_U[:2].tolist() == [0.0, 0.0] and np.abs(found_U[2:]).min() > 0.1
