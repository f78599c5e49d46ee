"""DPO: the pairs, the loss of the paper, and a stage's step."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from critic_groups import NEVER, WEIGHTS, same, sequence, tensors
from hypothesis import given
from hypothesis import strategies as st
from preference_groups import data, group_of, number
from serial_recipe import RECIPE
from serial_runs import trainer
from updates import FORKS, config, updater

from evolver_async.config import Config, LossConfig, StageConfig
from evolver_async.config.load import stage_config
from evolver_async.model import policy
from evolver_async.schema import Group, Role, TurnFlag
from learner.data.batch import Batch
from learner.data.collate import Lag, collate
from learner.data.selection import pairs
from learner.diagnostics.measure import StepResult
from learner.loss.accounting import Accounting
from learner.loss.dpo import PreferenceLoss, dpo_loss, pair_signs
from learner.state import LearnerState

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dpo") / "policy"
    policy.make_tiny(
        path, seed=0, hidden_size=16, layers=1, heads=2, intermediate_size=32, max_length=64
    )
    return path


def test_the_best_and_the_worst_of_a_group_are_compared_the_first_of_equals():
    chosen = pairs(
        [group_of(1, [0.5, 0, 1, 0, 1]), group_of(2, [1, 1, 1]), group_of(3, [0, 0.25, -1])]
    )
    assert [[one.member for one in group.trajectories] for group in chosen.groups] == [
        [1, 2],
        [1, 2],
    ]
    assert [group.group_id for group in chosen.groups] == [1, 3]
    assert chosen.filtered == {"zero_spread": [2]}


def test_an_overlong_member_is_in_no_pair_where_it_is_masked():
    best, others, whole = group_of(1, [0, 0.5, 1]), group_of(2, [0, 1]), group_of(3, [0, 1])
    for group, member in ((best, 2), (others, 0)):
        group.trajectories[member].turn_flags[-1] = TurnFlag.CUT
    assert [group.group_id for group in pairs([best, others, whole]).groups] == [1, 2, 3]
    chosen = pairs([best, others, whole], masked=True)
    members = [[one.member for one in group.trajectories] for group in chosen.groups]
    assert members == [[0, 1], [0, 1]] and chosen.filtered == {"truncated": [2]}


def test_a_pair_of_which_one_cannot_be_trained_is_left_out():
    silent, unpredicted, fine = (group_of(number, [0, 1]) for number in range(3))
    (mute,) = silent.trajectories[0].sequences
    mute.roles[:] = Role.PROMPT
    unpredicted.trajectories[1].sequences = [sequence("AO", [0], 0)]
    assert pairs([silent, unpredicted, fine]).filtered == {"no_tokens": [0, 1]}


def batch_of(*given_: Group) -> Batch:
    return collate(pairs(list(given_)).groups, {WEIGHTS: Lag(0)}, NEVER, whole_groups=True)


@given(
    number,
    st.integers(1, 5),
    st.integers(1, 40),
    st.floats(0.01, 2),
    st.floats(0, 2),
    st.integers(1, 4),
)
def test_the_loss_is_the_papers_whatever_the_micro_batches(
    seed, count, budget, beta, nll_coef, updates
):
    rng = np.random.default_rng(seed)
    batch = batch_of(*(group_of(n, rng.permutation(4).tolist(), seed) for n in range(count)))
    theta_N, reference_N = -rng.random((2, len(batch.mu_N))).astype(np.float32)
    settings = LossConfig(dpo_beta=beta, dpo_nll_coef=nll_coef)
    loss = PreferenceLoss(settings, pair_signs(batch), reference_N)
    found, margins = [], []
    for minibatch in batch.whole().split(updates, key=seed):
        total, terms = 0.0, {"dpo/margin": 0.0}
        for micro in minibatch.micro_batches(budget, CPU):
            theta = torch.from_numpy(theta_N[micro.index_N.numpy()])
            value, more = loss(theta, theta, micro, minibatch, Accounting())
            total += float(value)
            terms = {name: terms.get(name, 0.0) + float(term) for name, term in more.items()}
        members = minibatch.members.reshape(-1, 2)
        expected, expected_margin = 0.0, 0.0
        for one, other in members:
            chosen, rejected = sorted((one, other), key=lambda p: -batch.reward_P[p])
            gained = [
                sum(
                    float(theta_N[n] - reference_N[n])
                    for n in range(len(theta_N))
                    if batch.trajectory_N[n] == p
                )
                for p in (chosen, rejected)
            ]
            margin = beta * (gained[0] - gained[1])
            expected += -math.log(1 / (1 + math.exp(-margin))) / len(members)
            expected -= nll_coef * theta_N[batch.trajectory_N == chosen].mean() / len(members)
            expected_margin += margin / len(members)
        found.append((total, expected))
        margins.append((terms["dpo/margin"], expected_margin))
    assert len(found) == min(updates, count)  # a pair is never cut in two
    for ours, theirs in found + margins:
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_margin_of_0_costs_log_2_and_pulls_with_half_of_beta():
    margin_C = torch.zeros(3, requires_grad=True)
    loss = dpo_loss(margin_C)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(3 * math.log(2))
    assert margin_C.grad is not None and margin_C.grad.tolist() == [-0.5] * 3


# ---- inside of a stage


def settings_of(tiny: Path, minibatches: int = 1) -> Config:
    settings = config(tiny, [StageConfig(kind="dpo", steps=9)], minibatches)
    settings.learner.token_budget = 64
    return settings


def test_a_stage_begins_at_log_2_and_comes_to_prefer_the_better(tiny, tmp_path):
    settings, state = settings_of(tiny), LearnerState(lineage=1)
    made, stage = updater(settings, tmp_path), stage_config(settings, 0)
    made.begin_stage(stage, 0)

    def take() -> StepResult:
        outcome = made.step("dpo", stage, data(), state, FORKS, 9)
        state.take += 1
        return outcome

    first = take()
    assert first.metrics["loss/policy"] == pytest.approx(math.log(2), abs=1e-5)
    assert first.metrics["dpo/margin"] == pytest.approx(0, abs=1e-5)
    assert sorted(first.trained) == [0, 1, 2, 3] and first.updates == 1
    for _ in range(9):
        last = take()
    assert last.metrics["dpo/accuracy"] == 1
    assert last.metrics["dpo/margin"] > 0.1 and last.metrics["loss/policy"] < 0.65
    gap = last.metrics["dpo/better"] - last.metrics["dpo/worse"]
    assert last.metrics["dpo/margin"] == pytest.approx(0.1 * gap, rel=1e-3)


def test_with_its_likelihood_in_the_loss_the_better_member_becomes_likelier(tiny, tmp_path):
    better = {}
    for nll_coef in (0.0, 1.0):
        settings, state = settings_of(tiny), LearnerState(lineage=1)
        settings.loss.dpo_nll_coef = nll_coef
        made, stage = updater(settings, tmp_path), stage_config(settings, 0)
        made.begin_stage(stage, 0)
        for _ in range(9):
            outcome = made.step("dpo", stage, data(), state, FORKS, 9)
            state.take += 1
        better[nll_coef] = outcome.metrics["dpo/better"]
    assert better[1.0] > max(better[0.0], 0)


def test_more_updates_than_pairs_cut_none(tiny, tmp_path):
    settings = settings_of(tiny, minibatches=9)
    made, stage = updater(settings, tmp_path), stage_config(settings, 0)
    made.begin_stage(stage, 0)
    assert made.step("dpo", stage, data(), LearnerState(lineage=1), FORKS, 9).updates == 4


def test_groups_without_a_difference_train_nothing_and_are_named(tiny, tmp_path):
    settings = settings_of(tiny)
    made, stage = updater(settings, tmp_path), stage_config(settings, 0)
    made.begin_stage(stage, 0)
    before = tensors(made.model)
    outcome = made.step("dpo", stage, [group_of(7, [1, 1])], LearnerState(lineage=1), FORKS, 9)
    assert (outcome.trained, outcome.filtered, outcome.updates) == ([], {"zero_spread": [7]}, 0)
    assert same(before, tensors(made.model))


def test_the_reference_is_the_policy_at_the_stages_start_and_is_in_the_checkpoint(tiny, tmp_path):
    settings = settings_of(tiny)
    settings.stages = [StageConfig(kind="dpo", steps=1), StageConfig(kind="dpo", steps=1)]
    made, state = updater(settings, tmp_path), LearnerState(lineage=1)
    for index in range(2):
        made.begin_stage(stage_config(settings, index), index)
        assert made.reference is not None
        assert same(tensors(made.model), tensors(made.reference))
        made.step("dpo", stage_config(settings, index), data(), state, FORKS, 1)
        assert not same(tensors(made.model), tensors(made.reference))
    (tmp_path / "c").mkdir()
    made.save(tmp_path / "c", state)
    again = updater(settings, tmp_path)
    again.restore(tmp_path / "c")
    assert again.reference is not None and made.reference is not None
    assert same(tensors(again.reference), tensors(made.reference))


@pytest.mark.process
def test_a_stage_of_a_run_learns_the_bandit_from_what_its_first_policy_sampled(tmp_path):
    run = trainer(tmp_path, RECIPE)(
        "run", "env.params.high_probability=1.0", "stages.1.kind=dpo", "stages.1.steps=16"
    )
    rows = [row for row in run.rows if row.get("stage_kind") == "dpo"]
    assert len(rows) == 16
    # nobody samples from the versions between, so the better arm stays as rare as it was
    success = [row["train/success"] for row in rows]
    assert max(success[8:]) < 0.8
    # but the policy that comes out pulls it: e^better is how much likelier it became
    assert math.exp(rows[-1]["dpo/better"]) * sum(success) / len(success) > 0.8
    (*_, last) = (row["eval/success"] for row in run.rows if "eval/success" in row)
    assert rows[-1]["dpo/accuracy"] == 1 and last >= 0.9


def test_by_success_a_group_that_failed_throughout_makes_no_pair():
    shaped, solved = group_of(0, [-0.3, -0.1]), group_of(1, [-0.1, 1.0])
    solved.trajectories[0].success, solved.trajectories[1].success = False, True
    for one in shaped.trajectories:
        one.success = False
    assert pairs([shaped, solved], "success").filtered == {"zero_spread": [0]}
    assert pairs([shaped, solved]).filtered == {}
