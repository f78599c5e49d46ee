"""KTO: mismatched rows, the loss of the paper, and a stage's step."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from critic_groups import NEVER, WEIGHTS, same, tensors
from hypothesis import given
from hypothesis import strategies as st
from preference_groups import data, group_of, number
from updates import FORKS, config, updater

from evolver_async.config import LossConfig, StageConfig
from evolver_async.config.load import stage_config
from evolver_async.model import policy
from evolver_async.schema import Role, TurnFlag
from learner.data.collate import Lag, collate
from learner.data.selection import trainable
from learner.loss.accounting import Accounting
from learner.loss.kto import KtoLoss, mismatched
from learner.state import LearnerState

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kto") / "policy"
    policy.make_tiny(
        path, seed=0, hidden_size=16, layers=1, heads=2, intermediate_size=32, max_length=64
    )
    return path


def test_members_that_cannot_train_are_left_out_and_all_others_kept():
    whole, cut, silent = group_of(0, [1, 1]), group_of(1, [0, 1]), group_of(2, [0])
    for one in cut.trajectories:
        one.turn_flags[-1] = TurnFlag.CUT
    silent.trajectories[0].sequences[0].roles[:] = Role.PROMPT
    chosen = trainable([whole, cut, silent], masked=True)
    assert [len(group.trajectories) for group in chosen.groups] == [2]
    assert chosen.filtered == {"truncated": [1], "no_tokens": [2]}


def test_actions_move_to_the_prompt_of_the_next_group():
    first, second = group_of(0, [0, 1, 1]), group_of(1, [1, 0])
    moved = mismatched([first, second], longest=64)
    for group, own, others in ((moved[0], first, second), (moved[1], second, first)):
        for place, one in enumerate(group.trajectories):
            answer = others.trajectories[place % len(others.trajectories)].sequences[0]
            (row,) = one.sequences
            assert one.member == own.trajectories[place].member
            assert (
                row.tokens[:2].tolist() == own.trajectories[place].sequences[0].tokens[:2].tolist()
            )
            assert row.tokens[2:].tolist() == answer.tokens[2:].tolist()
            assert (row.roles[2:] == Role.ACTION).all()


def test_in_a_group_alone_they_move_to_another_member_and_rows_are_cut():
    alone = group_of(0, [0, 1, 1])
    (moved,) = mismatched([alone], longest=3)
    for place, one in enumerate(moved.trajectories):
        answer = alone.trajectories[place - 1].sequences[0]
        assert one.sequences[0].tokens[2:].tolist() == answer.tokens[2:3].tolist()


@given(number, st.integers(1, 5), st.integers(1, 40), st.floats(0, 3), st.integers(1, 3))
def test_the_loss_is_the_papers_whatever_the_micro_batches(seed, count, budget, kl, updates):
    rng = np.random.default_rng(seed)
    groups = [group_of(n, rng.integers(0, 2, 3).tolist(), seed) for n in range(count)]
    batch = collate(groups, {WEIGHTS: Lag(0)}, NEVER)
    theta_N, reference_N = -rng.random((2, len(batch.mu_N))).astype(np.float32)
    settings = LossConfig(kto_beta=0.3, kto_desirable=1.5, kto_undesirable=0.5)
    good_P = batch.reward_P > 0
    loss = KtoLoss(settings, good_P, reference_N, kl)
    for minibatch in batch.whole().split(updates, key=seed):
        total, terms = 0.0, dict[str, float]()
        for micro in minibatch.micro_batches(budget, CPU):
            theta = torch.from_numpy(theta_N[micro.index_N.numpy()])
            value, more = loss(theta, theta, micro, minibatch, Accounting())
            total += float(value)
            terms = {name: terms.get(name, 0.0) + float(term) for name, term in more.items()}
        expected, gains, right = 0.0, {True: [0.0], False: [0.0]}, 0
        for p in minibatch.members:
            gain = float((theta_N - reference_N)[batch.trajectory_N == p].sum())
            sign, weight = (1, 1.5) if good_P[p] else (-1, 0.5)
            sigma = 1 / (1 + math.exp(-0.3 * sign * (gain - kl)))
            expected += weight * (1 - sigma) / len(minibatch.members)
            gains[bool(good_P[p])].append(gain)
            right += (gain > kl) == good_P[p]
        assert total == pytest.approx(expected, abs=1e-5)
        assert terms["kto/kl"] == pytest.approx(kl, abs=1e-5)
        assert terms["kto/accuracy"] == pytest.approx(right / len(minibatch.members), abs=1e-5)
        for name, found in (("desirable", gains[True]), ("undesirable", gains[False])):
            mean = sum(found) / max(1, len(found) - 1)
            assert terms[f"kto/{name}"] == pytest.approx(mean, abs=1e-4)


def test_a_stage_begins_at_half_and_comes_to_prefer_what_succeeded(tiny, tmp_path):
    settings, state = config(tiny, [StageConfig(kind="kto", steps=9)]), LearnerState(lineage=1)
    made, stage = updater(settings, tmp_path), stage_config(settings, 0)
    made.enter(stage, state)
    groups = data()
    for one in (one for group in groups for one in group.trajectories):
        one.success = one.reward > 0.9
    before, rows = tensors(made.model), []
    for _ in range(9):
        rows.append(made.step("kto", stage, groups, state, FORKS, 9).metrics)
        state.take += 1
    assert rows[0]["loss/policy"] == pytest.approx(0.5, abs=1e-5)
    assert rows[0]["kto/kl"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["loss/policy"] < 0.48
    assert rows[-1]["kto/desirable"] > rows[-1]["kto/undesirable"] + 1
    assert made.reference is not None and same(before, tensors(made.reference))
