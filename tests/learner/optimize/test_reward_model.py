"""The reward model: its loss on pairs, its training, checkpoints and directories."""

from pathlib import Path

import numpy as np
import pytest
import torch
from critic_groups import NEVER, WEIGHTS, crossed, same, tensors
from hypothesis import given
from hypothesis import strategies as st
from preference_groups import data, group_of, number
from transformers import AutoModelForSequenceClassification
from updates import FORKS, config, updater

from evolver_async.config import Config, StageConfig
from evolver_async.config.load import stage_config
from evolver_async.model import policy
from evolver_async.model.policy import ModelError
from evolver_async.model.tokenizer import same_tokens
from evolver_async.schema import Group
from learner.data.batch import Batch
from learner.data.collate import Lag, collate
from learner.data.selection import pairs
from learner.loss.accounting import Accounting
from learner.loss.bradley_terry import BradleyTerry
from learner.optimize import reward_model
from learner.state import LearnerState
from learner.step import Updater

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "policy"
    policy.make_tiny(
        path, seed=0, hidden_size=16, layers=1, heads=2, intermediate_size=32, max_length=64
    )
    return path


def two_contexts(number: int) -> Group:
    """A pair of which the first member has two sequences."""
    group = crossed()
    group.group_id = number
    return group


def batch_of(*given_: Group) -> Batch:
    return collate(pairs(list(given_)).groups, {WEIGHTS: Lag(0)}, NEVER, whole_groups=True)


@given(number, st.integers(1, 4), st.integers(1, 40), st.integers(1, 3))
def test_the_loss_compares_the_scores_behind_the_last_rows(seed, count, budget, updates):
    rng = np.random.default_rng(seed)
    groups = [group_of(n, rng.permutation(3).tolist(), seed) for n in range(count)]
    batch = batch_of(*groups, two_contexts(count))
    score_R = rng.normal(size=len(batch.trajectory_R)).astype(np.float32)
    for minibatch in batch.whole().split(updates, key=seed):
        total, accuracy = 0.0, 0.0
        for micro in minibatch.micro_batches(budget, CPU):
            score_B = torch.from_numpy(score_R[micro.row_B.numpy()])
            value, terms = BradleyTerry(0.1)(score_B, score_B, micro, minibatch, Accounting())
            total += float(value)
            accuracy += float(terms["reward_model/accuracy"])
        expected, right = 0.0, 0
        both = minibatch.members.reshape(-1, 2)
        for one, other in both:
            better, worse = sorted((one, other), key=lambda p: -batch.reward_P[p])
            r, s = (score_R[np.flatnonzero(batch.trajectory_R == p)[-1]] for p in (better, worse))
            expected += (np.log1p(np.exp(s - r)) + 0.1 * (r + s) ** 2) / len(both)
            right += r > s
        assert total == pytest.approx(expected, abs=1e-4)
        assert accuracy == pytest.approx(right / len(both), abs=1e-6)


# ---- inside of a stage


def settings_of(tiny: Path, **given_: int) -> Config:
    settings = config(tiny, [StageConfig(kind="reward_model", steps=9)])
    settings.learner.token_budget = 64
    for name, value in given_.items():
        setattr(settings.learner, name, value)
    return settings


def trained(settings: Config, directory: Path, steps: int = 9) -> tuple[Updater, list[dict]]:
    made, state = updater(settings, directory), LearnerState(lineage=1)
    stage, rows = stage_config(settings, 0), []
    made.enter(stage, state)
    for _ in range(steps):
        rows.append(made.step("reward_model", stage, data(), state, FORKS, 9).metrics)
        state.take += 1
    return made, rows


@pytest.mark.parametrize("packing", [False, True])
def test_a_stage_learns_the_order_and_leaves_the_policy_as_it_was(tiny, tmp_path, packing):
    settings = settings_of(tiny)
    settings.learner.packing = packing
    before = tensors(updater(settings, tmp_path).model)
    made, rows = trained(settings, tmp_path)
    assert rows[0]["loss/reward_model"] == pytest.approx(np.log(2), abs=1e-6)
    assert rows[-1]["reward_model/accuracy"] == 1 and rows[-1]["reward_model/margin"] > 1
    assert same(before, tensors(made.model))


def test_epochs_pass_over_a_steps_groups_again_each_in_another_order(tiny, tmp_path):
    settings = settings_of(tiny, minibatches=2, epochs=3)
    made, (row,) = trained(settings, tmp_path, steps=1)
    assert row["learner/updates"] == 6
    cuts = made.stepper.cut(stage_config(settings, 0), batch_of(*data()).whole(), take=5)
    orders = [
        tuple(int(p) for one in cuts[first : first + 2] for p in one.members)
        for first in range(0, 6, 2)
    ]
    assert len(set(orders)) > 1 and len({frozenset(one) for one in orders}) == 1


def test_it_is_resumed_bitwise_and_dropped_after_the_last_stage_that_trains_it(tiny, tmp_path):
    settings = settings_of(tiny)
    settings.stages.append(StageConfig(kind="rl", steps=1))
    whole, rows = trained(settings, tmp_path)
    made, _ = trained(settings, tmp_path, steps=4)
    (tmp_path / "c").mkdir()
    made.save(tmp_path / "c", LearnerState(lineage=1, take=4, entered=0))
    again, stage = updater(settings, tmp_path), stage_config(settings, 0)
    state = again.restore(tmp_path / "c")
    again.enter(stage, state)
    for row in rows[4:]:
        assert again.step("reward_model", stage, data(), state, FORKS, 9).metrics == row
        state.take += 1
    assert again.reward_model is not None and whole.reward_model is not None
    assert same(again.reward_model.whole(), whole.reward_model.whole())
    again.begin_stage(stage_config(settings, 1), 1)
    assert again.reward_model is None


def test_what_is_written_is_a_classifier_that_gives_the_same_rewards(tiny, tmp_path):
    made, _ = trained(settings_of(tiny), tmp_path)
    made.export_reward_model(tmp_path / "models" / "0")
    made.export_reward_model(tmp_path / "models" / "0")  # again, after a resume
    written = tmp_path / "models" / "0"
    assert [one.name for one in written.parent.iterdir()] == ["0"]
    model = AutoModelForSequenceClassification.from_pretrained(written).eval()
    tokens_BT = torch.tensor([[3, 4, 5, 6]])
    assert made.reward_model is not None and model.config.num_labels == 1
    with torch.no_grad():
        ours = made.reward_model(tokens_BT, None)[0, -1]
        assert float(model(tokens_BT).logits) == pytest.approx(float(ours), abs=1e-6)
    assert same_tokens(written, tiny)
    # and a later run can begin with it
    settings = settings_of(tiny)
    settings.reward_model.path = str(written)
    reward_model.check(settings)
    later = updater(settings, tmp_path)
    later.enter(stage_config(settings, 0), LearnerState(lineage=1))
    assert later.reward_model is not None
    assert same(later.reward_model.whole(), made.reward_model.whole())


def test_a_directory_of_another_tokenizer_is_refused_by_its_key(tiny, tmp_path):
    policy.make_tiny(
        tmp_path / "other",
        **{"seed": 0, "hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 32},
        max_length=64,
        words=["further"],
    )
    settings = settings_of(tiny)
    settings.reward_model.path = str(tmp_path / "other")
    with pytest.raises(ModelError, match=r"^reward_model\.path: .* another tokenizer"):
        reward_model.check(settings)
