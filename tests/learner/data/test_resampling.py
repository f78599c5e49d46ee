"""Resample on correct: counts against rStar2's rule said step by step, penalties by hand."""

import numpy as np
import pytest
from episodes import episode
from hypothesis import given
from hypothesis import strategies as st
from selectable_groups import SEQUENCE, make_group

from evolver_async.schema import Group, TurnFlag
from learner.data.selection import LEAST, counts, penalty, resampled

CLEAN, FORMAT, INVALID = 0, int(TurnFlag.FORMAT_ERROR), int(TurnFlag.INVALID_ACTION)
CALL, TOOL = int(TurnFlag.TOOL_CALL), int(TurnFlag.TOOL_CALL | TurnFlag.TOOL_ERROR)
sizes = st.integers(0, 40)


def flagged_group(flags: list[list[int]], rewards: list[float], group_id: int = 0) -> Group:
    group = make_group(group_id, rewards)
    for trajectory, its_flags in zip(group.trajectories, flags, strict=True):
        trajectory.turn_flags = np.array(its_flags, np.uint8)
    return group


def rewards_of(group: Group) -> list[float]:
    return [trajectory.reward for trajectory in group.trajectories]


def members_of(group: Group) -> list[int]:
    return [trajectory.member for trajectory in group.trajectories]


@given(sizes, sizes, st.integers(4, 40))
def test_counts_fill_the_group_and_keep_two_of_either_side(wrong, correct, members):
    if wrong + correct == 0:
        return
    size = min(members, wrong + correct)
    k_wrong, k_correct = counts(wrong, correct, members)
    assert k_wrong + k_correct == size
    assert 0 <= k_wrong <= wrong and 0 <= k_correct <= correct
    if size >= 2 * LEAST:
        assert k_wrong >= min(LEAST, wrong) and k_correct >= min(LEAST, correct)
    # a share as near to the whole group's as the bounds allow
    lowest = max(min(LEAST, wrong), size - correct)
    highest = min(size - min(LEAST, correct), wrong)
    if size >= 2 * LEAST and lowest < k_wrong < highest:
        assert abs(k_wrong - wrong * size / (wrong + correct)) <= 0.5


@given(st.integers(1, 40), st.integers(1, 40), st.integers(4, 40))
def test_counts_are_those_of_the_step_by_step_rule(wrong, correct, members):
    n = wrong + correct
    if n < members:
        return
    zero, nonzero = round(wrong * members / n), round(correct * members / n)
    if zero <= min(2, wrong):
        zero = min(2, wrong)
        nonzero = members - zero
    if nonzero <= min(2, correct):
        nonzero = min(2, correct)
        zero = members - nonzero
    if zero + nonzero != members or zero > wrong or nonzero > correct:
        return  # two halves rounded alike: that rule has no answer there
    assert counts(wrong, correct, members) == (zero, nonzero)


def test_counts_of_all_members_are_all():
    assert counts(3, 2, 0) == (3, 2) and counts(1, 1, 0) == (1, 1) and counts(5, 0, 0) == (5, 0)
    assert counts(31, 1, 16) == (15, 1) and counts(1, 31, 16) == (1, 15)
    assert counts(30, 2, 16) == (14, 2) and counts(16, 16, 16) == (8, 8)


@pytest.mark.parametrize(
    ("flags", "terminated", "expected"),
    [
        ([CLEAN], True, 0.5),  # an answer at once: no tool was called
        ([CALL, CLEAN], True, 0.0),
        ([CALL], True, 0.0),  # the call was what the task asked for
        ([TOOL, CALL], True, 0.5),
        ([TOOL, CALL, CLEAN], True, 0.5),
        ([TOOL, TOOL, CLEAN], True, 1.0),
        ([TOOL | FORMAT, CALL, CALL, CLEAN], True, 1 / 3),  # counted once, as an error
        ([FORMAT, CLEAN], True, 1.0),
        ([CALL, FORMAT], True, 0.5),
        ([CALL, TOOL], False, 1.5),  # never answered
        ([FORMAT], False, 1.5),
        ([INVALID, CLEAN], True, 0.5),  # of a game without tools
        ([], False, 1.5),
        ([], True, 1.5),
    ],
)
def test_penalties_by_hand(flags, terminated, expected):
    one = episode(SEQUENCE, turns=len(flags), terminated=terminated)
    one.turn_flags = np.array(flags, np.uint8)
    assert penalty(one) == pytest.approx(expected)


def test_the_lowest_penalties_are_kept_earlier_ones_first_among_equals():
    clean, bad, worse = [CALL, CLEAN], [TOOL, CALL, CLEAN], [TOOL, CLEAN]
    group = flagged_group(
        [worse, clean, bad, clean, bad, worse, worse, worse], [1, 1, 0, 1, 1, 1, 0, 0]
    )
    kept = resampled(group, members=4, draw="lowest", seed=0)
    assert rewards_of(kept).count(0) == 2  # round(3 * 4 / 8)
    assert [m for m in members_of(kept) if group.trajectories[m].reward > 0] == [1, 3]
    assert kept.group_id == group.group_id and len(group.trajectories) == 8


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=2, max_size=16),
    st.sampled_from(["lowest", "inverse"]),
    st.sampled_from([0, *range(4, 13)]),
)
def test_what_is_kept_are_members_in_their_order(kinds, draw, members):
    flags = [[TOOL] * errors + [CALL] * (3 - errors) + [CLEAN] for _, errors in kinds]
    group = flagged_group(flags, [1.0 if correct else -1.0 for correct, _ in kinds])
    kept = resampled(group, members=members, draw=draw, seed=3)
    ids = members_of(kept)
    assert ids == sorted(set(ids)) and len(ids) == min(members or len(kinds), len(kinds))
    positives = [one for one in group.trajectories if one.reward > 0]
    chosen = [one for one in kept.trajectories if one.reward > 0]
    if draw == "lowest":
        expected = sorted(penalty(one) for one in positives)[: len(chosen)]
        assert sorted(penalty(one) for one in chosen) == pytest.approx(expected)
    again = resampled(group, members=members, draw=draw, seed=3)
    assert members_of(again) == ids


def test_correct_is_who_solved_the_task_whatever_the_reward():
    """Half of the task done, or a penalty on the way to all of it: rewards do not tell."""
    group = make_group(0, [0.5] * 6 + [-0.1] * 2)
    for one in group.trajectories:
        one.success = one.reward < 0
    kept = members_of(resampled(group, members=4, draw="lowest", seed=0))
    assert kept[2:] == [6, 7] and kept[1] < 6


def test_draws_belong_to_the_group_and_its_use():
    def wrong_kept(group_id: int, use: int) -> list[int]:
        group = flagged_group([[CLEAN]] * 16, [1.0] * 4 + [0.0] * 12, group_id)
        group.use = use
        return [m for m in members_of(resampled(group, members=8, draw="lowest", seed=0)) if m > 3]

    assert wrong_kept(0, 0) == wrong_kept(0, 0)
    assert len({tuple(wrong_kept(g, u)) for g in range(3) for u in range(3)}) > 5
    counted = np.bincount([m for g in range(600) for m in wrong_kept(g, 0)], minlength=16)
    assert (abs(counted[4:] / 600 - 0.5) < 0.08).all()  # 6 of 12, each as often as the others


def test_inverse_draws_follow_one_over_the_penalty():
    """Of penalties 0.2, 0.5, 1 the first draw goes 5:2:1; who has no penalty comes before."""
    fifth, half, whole = [TOOL] + [CALL] * 4 + [CLEAN], [TOOL, CALL, CLEAN], [TOOL, CLEAN]
    first = np.zeros(3)
    for group_id in range(2000):
        group = flagged_group([fifth, half, whole, [CLEAN]], [1.0, 1.0, 1.0, 0.0], group_id)
        (kept,) = [
            m for m in members_of(resampled(group, members=2, draw="inverse", seed=1)) if m < 3
        ]
        first[kept] += 1
    np.testing.assert_allclose(first / first.sum(), np.array([5, 2, 1]) / 8, atol=0.04)
    for group_id in range(200):
        group = flagged_group(
            [fifth, [CALL, CLEAN], whole, [CLEAN]], [1.0, 1.0, 1.0, 0.0], group_id
        )
        assert 1 in members_of(resampled(group, members=2, draw="inverse", seed=1))
    clean = np.zeros(2)
    for group_id in range(200):
        flags = [[CALL, CLEAN], [CALL, CLEAN], whole, [CLEAN]]
        group = flagged_group(flags, [1.0, 1.0, 1.0, 0.0], group_id)
        (kept,) = [
            m for m in members_of(resampled(group, members=2, draw="inverse", seed=1)) if m < 3
        ]
        clean[kept] += 1
    assert clean.min() > 70, "those without a penalty are drawn alike"
