"""Collation and stripping against loops over the sequences they came from."""

import numpy as np
import pytest
from budget import examples
from collated_groups import ALWAYS, NEVER, collated, make_groups
from hypothesis import given, settings
from hypothesis import strategies as st

from evolver_async.lineages import Fork
from evolver_async.schema import Group, Role, WeightId
from learner.data.collate import Internalise, Lag, guided, lag_table

strips = st.sampled_from([ALWAYS, NEVER, Internalise(0.5, 0), Internalise(0.5, 1)])


def expected_rows(groups: list[Group], strip: Internalise) -> list[tuple]:
    """(trajectory, tokens trained, tokens sampled, [(label, mu, lag, turn) of ACTION tokens],
    their places among the tokens sampled)."""
    rows = []
    trajectories = [t for group in groups for t in group.trajectories]
    for index, trajectory in enumerate(trajectories):
        stripped = strip(trajectory)
        for sequence in trajectory.sequences:
            first = 9 - sequence.versions[0].weights.step if sequence.versions else 0
            lags = [9 - run.weights.step for run in sequence.versions for _ in range(run.tokens)]
            tokens, actions, places = [], [], []
            for t in range(len(sequence)):
                if sequence.roles[t] == Role.EXPERIENCE and stripped:
                    continue
                if sequence.roles[t] == Role.ACTION:
                    lag = lags.pop(0) if sequence.versions else 0
                    if tokens:
                        turn = int(sequence.turns[t])
                        swapped = lag != first
                        told = int(sequence.tokens[t]), sequence.logprobs[t], lag, swapped, turn
                        actions.append(told)
                        places.append(t)
                tokens.append(int(sequence.tokens[t]))
            if actions:
                rows.append((index, tokens, sequence.tokens.tolist(), actions, places))
    return rows


@settings(max_examples=examples(60))
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.booleans(), strips)
def test_collation_strips_experience_and_keeps_every_action_token(
    seed, count, members, scripted, strip
):
    groups = make_groups(seed, count, members, scripted=scripted)
    batch = collated(groups, strip)
    rows = expected_rows(groups, strip)
    assert len(batch.trajectory_R) == len(rows)
    for r, (trajectory, tokens, _, actions, _) in enumerate(rows):
        row = slice(batch.row_start_R[r], batch.row_start_R[r + 1])
        own = slice(batch.action_start_R[r], batch.action_start_R[r + 1])
        assert batch.trajectory_R[r] == trajectory
        assert batch.tokens[row].tolist() == tokens
        labels = batch.tokens[row][batch.action[row]]
        facts = (batch.mu_N, batch.lag_N, batch.swapped_N, batch.turn_N)
        assert list(zip(labels, *(fact[own] for fact in facts), strict=True)) == actions
        assert (batch.trajectory_N[own] == trajectory).all()
    for p in range(len(batch.reward_P)):
        own_lags = [a[2] for row in rows if row[0] == p for a in row[3]]
        assert batch.length_P[p] == len(own_lags)
        assert batch.lag_P[p] == max(own_lags, default=0)
    assert batch.group_P.tolist() == [g for g in range(count) for _ in range(members)]


@settings(max_examples=examples(60))
@given(st.integers(0, 10**6), strips)
def test_the_sampled_contexts_hold_the_same_actions_of_the_stripped_alone(seed, strip):
    groups = make_groups(seed, 3, 3)
    batch = collated(groups, strip)
    trajectories = [t for group in groups for t in group.trajectories]
    assert batch.stripped_P.tolist() == [strip(t) for t in trajectories]
    rows = [row for row in expected_rows(groups, strip) if batch.stripped_P[row[0]]]
    if not rows:
        assert batch.sampled is None
        return
    sampled = batch.sampled
    assert sampled is not None and len(sampled.trajectory_R) == len(rows)
    for r, (_, _, tokens, _, places) in enumerate(rows):
        row = slice(sampled.row_start_R[r], sampled.row_start_R[r + 1])
        assert sampled.tokens[row].tolist() == tokens
        assert np.flatnonzero(sampled.action[row]).tolist() == places
    # token by token the stripped ones of the batch, in its order
    for name in ("mu_N", "lag_N", "swapped_N", "turn_N", "trajectory_N"):
        assert (getattr(sampled, name) == getattr(batch, name)[batch.stripped_N]).all()
    mine, theirs = batch.tokens[batch.action], sampled.tokens[sampled.action]
    assert (mine[batch.stripped_N] == theirs).all()


@settings(max_examples=examples(30))
@given(st.integers(0, 10**6))
def test_turns_are_flat_over_the_trajectories(seed):
    groups = make_groups(seed, 2, 3)
    batch = collated(groups)
    trajectories = [t for group in groups for t in group.trajectories]
    for p, trajectory in enumerate(trajectories):
        turns = slice(batch.turn_start_P[p], batch.turn_start_P[p + 1])
        assert (batch.turn_reward_U[turns] == trajectory.turn_rewards).all()
        assert (batch.label_U[turns] == trajectory.labels).all()
    turn_rewards = [
        trajectories[p].turn_rewards[k]
        for p, k in zip(batch.trajectory_N, batch.turn_N, strict=True)
    ]
    assert batch.turn_reward_U[batch.turn_at_N].tolist() == turn_rewards


@settings(max_examples=examples(40))
@given(st.integers(0, 10**6), st.sampled_from([0.5, 1.0]))
def test_distillation_keeps_all_rows_and_has_those_of_stripping_beside_them(seed, fraction):
    groups = make_groups(seed, 3, 3)
    batch = collated(groups, Internalise(fraction, 0, teaches=True))
    kept, stripped = collated(groups, NEVER), collated(groups, Internalise(fraction, 0))
    assert batch.sampled is None and not batch.stripped_P.any()
    for name in ("tokens", "action", "mu_N", "trajectory_N", "length_P"):
        assert (getattr(batch, name) == getattr(kept, name)).all()
    if batch.taught is None:
        assert stripped.sampled is None
        return
    assert stripped.sampled is not None and batch.taught.sampled is not None
    there = batch.taught.trajectory_N
    assert (batch.taught.stripped_P == stripped.stripped_P).all()
    assert (batch.taught.mu_N == stripped.mu_N[stripped.stripped_N]).all()
    ours, theirs = batch.taught.sampled, stripped.sampled
    assert (ours.tokens == theirs.tokens).all() and (ours.action == theirs.action).all()
    assert (batch.taught.tokens[batch.taught.action] == ours.tokens[ours.action]).all()
    assert (ours.trajectory_N == there).all()
    assert (ours.action_start_R == batch.taught.action_start_R).all()


def test_a_fraction_is_drawn_by_group_and_member_and_only_of_the_guided():
    groups = make_groups(0, 300, 4, sequences=1)
    trajectories = [t for group in groups for t in group.trajectories]
    strip = Internalise(0.3, 7)
    drawn = {t.trajectory_id for t in trajectories if strip(t)}
    there = {t.trajectory_id for t in trajectories if guided(t)}
    assert drawn < there
    assert abs(len(drawn) / len(there) - 0.3) < 0.06
    assert drawn == {t.trajectory_id for t in reversed(trajectories) if strip(t)}
    for name in ("group_id", "member"):  # neither decides alone
        mixed = [
            {strip(t) for t in trajectories if guided(t) and getattr(t, name) == value}
            for value in {getattr(t, name) for t in trajectories}
        ]
        assert {True, False} in mixed
    assert drawn != {t.trajectory_id for t in trajectories if Internalise(0.3, 8)(t)}
    assert {t.trajectory_id for t in trajectories if ALWAYS(t)} == there
    assert not any(NEVER(t) for t in trajectories)
    assert not any(Internalise(0.0, 7)(t) for t in trajectories)
    assert {t.trajectory_id for t in trajectories if Internalise(1.0, 7)(t)} == there


@pytest.mark.parametrize("teaches", [False, True])
def test_trajectories_that_copy_keep_their_context_each_by_itself(teaches: bool):
    groups = make_groups(4, 3, 4, sequences=1)
    trajectories = [one for group in groups for one in group.trajectories]
    copied = {one.trajectory_id for one in trajectories[::3]}
    strip = Internalise(1.0, 0, teaches, copies=lambda one: one.trajectory_id in copied)
    batch = collated(groups, strip)
    expected = [(one.trajectory_id in copied, guided(one)) for one in trajectories]
    assert list(zip(batch.copied_P, batch.guided_P, strict=True)) == expected
    internalised = [is_guided and not copies for copies, is_guided in expected]
    bare = batch.taught if teaches else batch
    assert bare is not None and bare.stripped_P.tolist() == internalised
    assert any(internalised) and any(copies and is_guided for copies, is_guided in expected)


def test_a_sequence_of_experience_alone_is_no_row_and_no_error():
    groups = make_groups(3, 1, 2, sequences=1)
    sequence = groups[0].trajectories[0].sequences[0]
    sequence.roles[:] = Role.EXPERIENCE
    sequence.logprobs[:] = 0
    sequence.versions.clear()
    batch = collated(groups)
    assert 0 not in batch.trajectory_R and batch.length_P[0] == 0


def test_lag_is_counted_across_a_fork():
    groups = make_groups(0, 1, 2)
    forks = {
        1: Fork(lineage=1, parent=0, step=0),
        2: Fork(lineage=2, parent=1, step=4),
    }
    lags = lag_table(groups, WeightId(lineage=2, step=6), forks)
    for weights, lag in lags.items():
        past = weights.step > 4
        assert lag == Lag(2 + weights.step - 4 if past else 6 - weights.step, abandoned=past)
    for group in groups:
        group.head = WeightId(lineage=2, step=6)
    again = lag_table(groups, WeightId(lineage=2, step=9), forks)
    assert again == lags, "a repeated take has the lags of its first time"
