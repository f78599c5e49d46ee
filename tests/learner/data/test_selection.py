"""Which groups are kept, against the rule said in loops."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import SELECTIONS
from selectable_groups import make_group

from evolver_async.config import SelectionConfig
from evolver_async.errors import TrainingError
from evolver_async.schema import Group, TurnFlag
from learner.data.selection import Selected, reward_spread, select


def make_groups(rewards: list[list[float]]) -> list[Group]:
    return [make_group(100 + i, member_rewards) for i, member_rewards in enumerate(rewards)]


groups_of_rewards = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=3, max_size=3), min_size=1, max_size=8
)


def left_out(selected: Selected) -> list[int]:
    return [group_id for ids in selected.filtered.values() for group_id in ids]


@pytest.mark.parametrize(
    ("keep", "groups", "kept"),
    [(0.25, 7, 2), (0.25, 6, 2), (0.25, 5, 1), (0.25, 10, 2), (0.1, 3, 1)],
)
def test_the_share_of_groups_is_rounded_and_never_none(keep, groups, kept):
    made = make_groups([[0.0, 1.0 + number] for number in range(groups)])
    selected = select(made, SelectionConfig(kind="spread", keep=keep), seed=0)
    assert [group.group_id - 100 for group in selected.groups] == [*range(groups)][-kept:]


@pytest.mark.parametrize(
    ("kind", "p", "rewards"),
    [
        ("top_p", 0.8, [[0.0, 0.6], [0.0, 0.6], [0.0, 0.3]]),  # 0.8 of them is 0.6000000000000001
        ("min_p", 1.0, [[0.0, 0.6], [0.3, 0.9]]),  # the second spread is 0.30000000000000004
    ],
)
def test_the_last_digit_of_a_sum_or_of_a_spread_decides_nothing(kind, p, rewards):
    selected = select(make_groups(rewards), SelectionConfig(kind=kind, p=p), seed=0)
    assert [group.group_id for group in selected.groups] == [100, 101]


@given(
    groups_of_rewards,
    st.sampled_from(sorted(SELECTIONS)),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.25, 0.5, 1.0]),
    st.integers(1, 9),
    st.booleans(),
)
def test_every_kind_keeps_what_its_rule_says(rewards, kind, p, keep, k, drop_zero):
    groups = make_groups(rewards)
    settings = SelectionConfig(kind=kind, p=p, keep=keep, k=k, drop_zero=drop_zero, scale="sqrt")
    selected = select(groups, settings, seed=0)
    spreads = [reward_spread(group) for group in groups]
    expected = SELECTIONS[kind](spreads, settings)
    assert [group.group_id for group in selected.groups] == [100 + i for i in sorted(expected)]
    assert sorted(left_out(selected)) == [100 + i for i in range(len(groups)) if i not in expected]
    assert set(selected.filtered) <= {"zero_spread", kind}
    alike = [100 + i for i, spread in enumerate(spreads) if spread == 0 and i not in expected]
    assert selected.filtered.get("zero_spread", []) in ([], alike)
    assert not drop_zero or kind == "all" or "zero_spread" in selected.filtered or not alike
    share = len(expected) / len(groups)
    assert selected.scale == math.sqrt(share)
    assert selected.metrics["selection/kept_share"] == share


def test_top_p_is_a_share_of_the_summed_spread():
    """Spreads 0.5, 0.3, 0.1, 0.1, 0: 90 % needs three, 80 % two, 100 % four."""
    rewards = [[0.2, 0.0], [0.6, 0.0], [0.5, 0.5], [1.0, 0.0], [0.2, 0.0]]
    for p, expected in ((0.8, [101, 103]), (0.9, [100, 101, 103]), (1.0, [100, 101, 103, 104])):
        selected = select(make_groups(rewards), SelectionConfig(kind="top_p", p=p), seed=0)
        assert [group.group_id for group in selected.groups] == expected
        assert selected.filtered["zero_spread"] == [102]


def test_advantages_are_scaled_by_the_share_that_is_left():
    rewards = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.5, 0.5]]
    for scale, expected in (("none", 1.0), ("linear", 0.25), ("sqrt", 0.5)):
        selected = select(
            make_groups(rewards), SelectionConfig(kind="dynamic", scale=scale), seed=0
        )
        assert selected.scale == expected


def test_members_are_resampled_where_a_group_has_both_outcomes():
    groups = make_groups([[1.0] * 4 + [0.0] * 4, [1.0] * 8])
    for one in groups[0].trajectories[:2]:
        one.turn_flags = np.array([TurnFlag.FORMAT_ERROR], np.uint8)
    settings = SelectionConfig(kind="resample_on_correct", members=4)
    selected = select(groups, settings, seed=0)
    assert selected.filtered == {"zero_spread": [101]}
    (group,) = selected.groups
    assert [one.member for one in group.trajectories if one.reward] == [2, 3]
    assert len(group.trajectories) == 4 and len(groups[0].trajectories) == 8
    assert selected.metrics["selection/members_left_out"] == 4
    assert selected.metrics["selection/penalty_all"] == 1.0  # no tool was called: 0.5, +1 for two
    assert selected.metrics["selection/penalty_kept"] == 0.5


def test_equal_rewards_have_exactly_zero_spread():
    assert reward_spread(make_group(0, [0.1, 0.1, 0.1])) == 0


def test_all_keeps_everything():
    groups = [make_group(0, [1.0, 1.0]), make_group(1, [0.0, 1.0])]
    selected = select(groups, SelectionConfig(kind="all", scale="sqrt"), seed=0)
    assert selected.groups == groups and selected.filtered == {} and selected.scale == 1


@pytest.mark.parametrize("kind", ["spread", "top_p", "top_k", "min_p", "resample_on_correct"])
def test_nothing_is_left_of_a_step_without_spread(kind):
    selected = select([make_group(7, [1.0, 1.0])], SelectionConfig(kind=kind), seed=0)
    assert selected.groups == [] and selected.filtered == {"zero_spread": [7]}


WRONG = {
    "truths": [True, False],
    "arrays": np.array([True, False]),
    "beyond": [0, 2],
    "below": [-1],
    "nothing": None,
    "names": ["0"],
}


def chosen_by_name(groups: list[Group], spreads: list[float], settings: SelectionConfig) -> object:
    return WRONG[settings.params["wrong"]]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_selection_of_anything_but_indices_ends_training_with_its_name(wrong: str) -> None:
    kind = f"{__name__}:chosen_by_name"
    settings = SelectionConfig(kind=kind, params={"wrong": wrong})
    said = rf"^selection\.kind: {kind} must return indices of groups, from 0 to 1"
    with pytest.raises(TrainingError, match=said):
        select(make_groups([[0, 1], [1, 0]]), settings, seed=0)


def test_rewards_that_differ_by_rounding_alone_are_equal():
    groups = make_groups([[0.1 + 0.2, 0.3], [0.0, 2e-6]])
    selected = select(groups, SelectionConfig(kind="dynamic"), seed=0)
    assert reward_spread(groups[0]) == 0.0
    assert selected.filtered == {"zero_spread": [100]}


@pytest.mark.parametrize("kind", ["spread", "top_p", "top_k", "min_p", "dynamic"])
def test_by_success_shaping_alone_trains_no_group(kind):
    """All failed with different rewards, all succeeded with different rewards, and both."""
    groups = make_groups([[-0.3, -0.1], [0.5, 1.0], [-0.1, 1.0]])
    settings = SelectionConfig(kind=kind, by="success", keep=1.0)
    selected = select(groups, settings, seed=0)
    assert [group.group_id for group in selected.groups] == [102]
    assert selected.filtered == {"zero_spread": [100, 101]}
    assert len(select(groups, SelectionConfig(kind=kind, keep=1.0, p=0.1), seed=0).groups) > 0
