"""One step on a tiny model: the KL reference, non-finite updates, the optimizer and its state."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stripping import stripped
from updates import FORKS, config, groups, guided_config, guided_groups, same, step, tiny, updater

from evolver_async.config import (
    AdvantageConfig,
    CorrectionConfig,
    JudgeConfig,
    LossConfig,
    StageConfig,
)
from evolver_async.config.load import stage_config
from evolver_async.errors import TrainingError
from evolver_async.metrics.alerts import ALERTS
from evolver_async.metrics.tail import Tail
from evolver_async.model import policy
from evolver_async.schema import (
    Group,
    Role,
    TurnFlag,
)
from learner.advantage.group_relative import EstimatorInput
from learner.advantage.shaped_rewards import Rewards
from learner.loss.accounting import Accounting
from learner.loss.correction import ActionTokens, Corrected, correction, decoupled, vcpo
from learner.optimize import updates as under_test
from learner.optimize.tensors import load_optimizer, save_tensors
from learner.state import LearnerState, PendingEvaluation
from learner.step import Updater

__all__ = ["tiny"]  # the fixture


def drift(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def test_the_reference_is_taken_where_the_first_stage_with_a_kl_begins(tiny, tmp_path):
    stages = [
        StageConfig(kind="sft", steps=1),
        StageConfig(kind="rl", steps=1),
        StageConfig(kind="rl", steps=1),
        StageConfig(kind="rl", steps=1, refresh_reference=True),
    ]
    settings = config(tiny, stages, kl_coef=0.1)
    made = updater(settings, tmp_path)
    made.begin_stage(stage_config(settings, 0), 0)
    assert made.reference is None
    drift(made.model)
    made.begin_stage(stage_config(settings, 1), 1)
    assert made.reference is not None and same(made.reference, made.model)
    drift(made.model)
    made.begin_stage(stage_config(settings, 2), 2)
    made.ensure_reference(stage_config(settings, 2), 2)
    assert not same(made.reference, made.model)
    made.begin_stage(stage_config(settings, 3), 3)
    assert same(made.reference, made.model)


@pytest.mark.parametrize(
    ("later", "kept"),
    [
        ([], False),
        ([StageConfig(kind="dpo", steps=1)], False),
        ([StageConfig(kind="rl", steps=1, override={"loss": {"kl_coef": 0.1}})], True),
    ],
)
def test_a_reference_that_no_stage_will_read_is_dropped(tiny, tmp_path, later, kept):
    """Of a large model it is gigabytes."""
    stages = [StageConfig(kind="dpo", steps=1), StageConfig(kind="rl", steps=1), *later]
    settings = config(tiny, stages)
    made = updater(settings, tmp_path)
    made.begin_stage(stage_config(settings, 0), 0)
    first = made.reference
    assert first is not None
    made.begin_stage(stage_config(settings, 1), 1)
    assert made.reference is (first if kept else None)
    if later:
        made.begin_stage(stage_config(settings, 2), 2)
        assert (made.reference is first) == kept and made.reference is not None


def test_a_reference_that_a_rollback_will_read_is_kept(tiny, tmp_path):
    stages = [
        StageConfig(kind="rl", steps=1),
        StageConfig(kind="rl", steps=1, override={"loss": {"kl_coef": 0.0}}),
    ]
    settings = config(tiny, stages, kl_coef=0.1)
    settings.safety.action, settings.safety.rollback = "rollback", {"loss": {"kl_coef": 0.2}}
    made = updater(settings, tmp_path)
    made.begin_stage(stage_config(settings, 0), 0)
    first = made.reference
    made.begin_stage(stage_config(settings, 1), 1)
    made.ensure_reference(stage_config(settings, 1, 1), 1)
    assert first is not None and made.reference is first


def test_a_kl_switched_on_at_a_resume_gets_a_reference(tiny, tmp_path):
    settings = config(tiny, [StageConfig(kind="rl", steps=1)], kl_coef=0.1)
    made = updater(settings, tmp_path)
    stage = stage_config(settings, 0)
    with pytest.raises(AssertionError, match="reference"):
        made.step("rl", stage, groups(2), LearnerState(lineage=1), FORKS, 1)
    made.ensure_reference(stage, 0)  # the stage itself began without a KL
    outcome = made.step("rl", stage, groups(2), LearnerState(lineage=1), FORKS, 1)
    assert outcome.metrics["loss/kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", ["ppo", "decoupled"])
def test_the_kl_in_the_reward_is_that_of_the_present_policy(tiny, tmp_path, kind):
    """Whether the correction reads no anchor of its own or one that could come late."""
    settings = config(
        tiny, [StageConfig(kind="rl", steps=1)], kl="k1", kl_coef=0.1, kl_place="reward"
    )
    settings.correction.kind = kind
    made = updater(settings, tmp_path)
    stage = stage_config(settings, 0)
    made.ensure_reference(stage, 0)
    outcome = made.step("rl", stage, groups(2), LearnerState(lineage=1), FORKS, 1)
    # policy and reference are the same weights, although mu is far from them
    assert outcome.metrics["loss/kl"] == pytest.approx(0.0, abs=1e-6)
    drift(made.model)
    outcome = made.step("rl", stage, groups(2), LearnerState(lineage=1), FORKS, 1)
    assert outcome.data is not None
    expected = (
        outcome.data.credit.logprobs.anchor_N - outcome.data.credit.logprobs.reference_N
    ).mean()
    assert outcome.metrics["loss/kl"] == pytest.approx(float(expected), rel=1e-4)
    assert abs(expected) > 1e-4


def test_groups_without_an_applied_update_are_reported_and_not_measured(
    tiny, tmp_path, monkeypatch
):
    settings = config(tiny, [StageConfig(kind="rl", steps=1)], minibatches=2)
    made = updater(settings, tmp_path)
    calls = []
    original = under_test.update

    def second_is_not_finite(*arguments: Any, loss: float, **options: Any) -> Any:
        calls.append(loss)
        return original(*arguments, loss=loss if len(calls) == 1 else np.nan, **options)

    monkeypatch.setattr(under_test, "update", second_is_not_finite)
    state = LearnerState(lineage=1)
    outcome = made.step("rl", stage_config(settings, 0), groups(4), state, FORKS, 1)
    assert outcome.updates == 1 and state.bad_steps == 1
    left_out = outcome.filtered["non_finite"]
    assert len(left_out) == len(outcome.trained) == 2
    assert sorted(left_out + outcome.trained) == [10, 11, 12, 13]
    assert outcome.tokens == outcome.metrics["offpolicy/tokens"] == 2 * 3
    assert outcome.metrics["loss/policy"] == pytest.approx(calls[0], rel=1e-4)
    assert list((tmp_path / "bad").glob("*.npz"))


def test_when_nothing_is_applied_everything_is_left_out(tiny, tmp_path):
    settings = config(tiny, [StageConfig(kind="rl", steps=1)])
    made = updater(settings, tmp_path)
    with torch.no_grad():
        next(made.model.parameters()).fill_(float("nan"))
    outcome = made.step(
        "rl", stage_config(settings, 0), groups(2), LearnerState(lineage=1), FORKS, 1
    )
    assert (outcome.trained, outcome.tokens, outcome.updates) == ([], 0, 0)
    assert outcome.filtered == {"non_finite": [10, 11]}
    assert "loss/policy" not in outcome.metrics and "offpolicy/ess" not in outcome.metrics


def divides_by_zero(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """Correction with a number that is not finite in the fields that `settings.params` name."""
    found = decoupled(tokens, settings)
    spoilt_N = torch.zeros_like(found.w_N) / 0
    return replace(found, **dict.fromkeys(settings.params["fields"], spoilt_N))


@pytest.mark.parametrize("fields", [["r_N", "w_N"], ["weight_N"]])
def test_an_own_correction_whose_numbers_are_not_finite_is_named(tiny, tmp_path, fields):
    """The log alone reads w_N and r_N; with the others the loss is lost, and in the end the run."""
    settings = config(tiny, [StageConfig(kind="rl", steps=9)])
    settings.correction.kind = f"{__name__}:divides_by_zero"
    settings.correction.params = {"fields": fields}
    made, state = updater(settings, tmp_path), LearnerState(lineage=1)
    stage, most = stage_config(settings, 0), settings.learner.max_bad_steps
    said = f"correction.kind: {settings.correction.kind} returned numbers that are not finite:"
    for _ in range(most - 1):
        made.step("rl", stage, groups(2), state, FORKS, 9)
    titles = [(row["title"], said in row["text"]) for row in Tail(tmp_path / ALERTS).rows()]
    if fields != ["weight_N"]:
        made.step("rl", stage, groups(2), state, FORKS, 9)
        assert titles == [("not finite", True)] and state.bad_steps == 0, "told once"
        return
    assert titles == [("not finite", True), *[("step skipped", True)] * (most - 1)]
    with pytest.raises(TrainingError, match=f"in a row; batches in .*; {said} weight_N$"):
        made.step("rl", stage, groups(2), state, FORKS, 9)


def test_a_policy_that_is_not_finite_blames_no_correction(tiny, tmp_path):
    settings = config(tiny, [StageConfig(kind="rl", steps=1)])
    settings.correction.kind = f"{__name__}:divides_by_zero"
    settings.correction.params = {"fields": []}
    made = updater(settings, tmp_path)
    with torch.no_grad():
        next(made.model.parameters()).fill_(float("nan"))
    made.step("rl", stage_config(settings, 0), groups(2), LearnerState(lineage=1), FORKS, 1)
    assert [row["title"] for row in Tail(tmp_path / ALERTS).rows()] == ["step skipped"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_data_beyond_the_target_kl_end_a_step_after_its_first_update(tiny, tmp_path, dtype):
    """The groups that it leaves out say so, are not measured, and leave no gradient behind."""
    outcomes, weights = [], []
    for target_kl in (math.inf, 1e-9):
        settings = config(tiny, [StageConfig(kind="rl", steps=1)], minibatches=4)
        settings.policy.dtype, settings.correction.anchor = dtype, "interpolate"
        settings.loss.target_kl = target_kl
        made = updater(settings, tmp_path)
        state = LearnerState(lineage=1)
        outcomes.append(made.step("rl", stage_config(settings, 0), groups(4), state, FORKS, 1))
        optimized = [p for group in made.optimizer.param_groups for p in group["params"]]
        assert all(one.grad is None for one in (*optimized, *made.model.parameters()))
        assert state.bad_steps == 0
        weights.append(made)
    whole, cut = outcomes
    assert (whole.updates, whole.filtered) == (4, {})
    assert cut.updates == 1 and cut.metrics["learner/updates"] == 1
    assert len(cut.trained) == 1 and cut.filtered.keys() == {"target_kl"}
    assert sorted(cut.trained + cut.filtered["target_kl"]) == whole.trained
    assert cut.tokens == cut.metrics["offpolicy/tokens"] == whole.tokens / 4
    assert cut.metrics["offpolicy/trajectories"] == whole.metrics["offpolicy/trajectories"] / 4
    assert cut.metrics["offpolicy/kl"] > 1e-9  # the data of the first update are far, too
    assert cut.metrics["offpolicy/kl_beyond"] > 1e-9
    assert "offpolicy/kl_beyond" not in whole.metrics
    assert not same(weights[0].model, weights[1].model)


def test_a_first_update_that_moves_the_data_of_the_next_beyond_the_target_kl_is_taken_back(
    tiny, tmp_path
):
    settings = config(tiny, [StageConfig(kind="rl", steps=1)], minibatches=2)
    settings.loss.target_kl = 1e-9
    made, before = updater(settings, tmp_path), updater(settings, tmp_path)
    outcome = made.step(
        "rl", stage_config(settings, 0), groups(4), LearnerState(lineage=1), FORKS, 1
    )
    assert outcome.updates == 0 == len(outcome.trained)
    assert len(outcome.filtered["target_kl"]) == 4
    assert outcome.metrics["learner/taken_back"] == 1
    assert outcome.metrics["offpolicy/kl_beyond"] > 1e-9
    for one, other in zip(made.model.parameters(), before.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_an_update_that_is_not_finite_is_one_however_far_its_data_are(tiny, tmp_path, monkeypatch):
    settings = config(tiny, [StageConfig(kind="rl", steps=1)], minibatches=2)
    settings.loss.target_kl = 1e-9
    made = updater(settings, tmp_path)
    gradients, losses = made.stepper.passes.gradients, iter((1.0, math.nan))
    monkeypatch.setattr(
        made.stepper.passes, "gradients", lambda *given: (next(losses), gradients(*given)[1])
    )
    state = LearnerState(lineage=1)
    outcome = made.step("rl", stage_config(settings, 0), groups(4), state, FORKS, 1)
    assert state.bad_steps == 1 and outcome.filtered.keys() == {"non_finite"}


def test_an_update_that_breaks_the_policy_is_taken_back_though_the_next_one_is_not_finite(
    tiny, tmp_path, monkeypatch
):
    settings = config(tiny, [StageConfig(kind="rl", steps=1)], minibatches=2)
    settings.loss.target_kl = 0.2
    begin, made = updater(settings, tmp_path).model, updater(settings, tmp_path)
    gradients, losses = made.stepper.passes.gradients, iter((1.0, math.nan))
    monkeypatch.setattr(
        made.stepper.passes, "gradients", lambda *given: (next(losses), gradients(*given)[1])
    )
    told = iter((0.1, 0.1, math.nan))
    monkeypatch.setattr(under_test.Accounting, "moved", lambda _: next(told))
    state = LearnerState(lineage=1)
    outcome = made.step("rl", stage_config(settings, 0), groups(4), state, FORKS, 1)
    assert outcome.metrics["learner/taken_back"] == 1 and outcome.updates == 0
    assert len(outcome.filtered["non_finite"]) == 4 and state.bad_steps == 1
    for left, right in zip(made.model.parameters(), begin.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


def test_a_step_without_a_finite_advantage_is_counted_under_a_target_kl_too(tiny, tmp_path):
    settings = config(tiny, [StageConfig(kind="rl", steps=1)], minibatches=2)
    settings.loss.target_kl = 0.2
    taken, state = groups(4), LearnerState(lineage=1)
    for group in taken:
        group.trajectories[0].reward = math.nan
    outcome = updater(settings, tmp_path).step(
        "rl", stage_config(settings, 0), taken, state, FORKS, 1
    )
    assert state.bad_steps == 1 and outcome.updates == 0 == outcome.metrics["learner/taken_back"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_that_moves_the_policy_beyond_the_target_kl_is_taken_back(
    tiny, tmp_path, monkeypatch, dtype
):
    """What comes before it stays; its groups are left out like those after it."""
    outcomes, models = [], []
    # beyond the bound from the beginning: one update, which is not taken back
    for kls in ((0.3, 0.3), (0.1, 0.1, 0.5, 0.4)):
        settings = config(tiny, [StageConfig(kind="rl", steps=1)], minibatches=4)
        settings.policy.dtype, settings.loss.target_kl = dtype, 0.2
        settings.correction.anchor = "interpolate"
        made, told = updater(settings, tmp_path), iter(kls)
        monkeypatch.setattr(under_test.Accounting, "moved", lambda _, told=told: next(told))
        outcomes.append(
            made.step("rl", stage_config(settings, 0), groups(4), LearnerState(lineage=1), FORKS, 1)
        )
        assert next(told, None) is None
        models.append(made)
    one, cut = outcomes
    assert one.metrics["learner/taken_back"] == 0 and cut.metrics["learner/taken_back"] == 1
    assert one.metrics["offpolicy/kl_beyond"] == 0.3 and cut.metrics["offpolicy/kl_beyond"] == 0.5
    assert one.updates == cut.updates == 1
    assert cut.trained == one.trained and cut.filtered == one.filtered
    assert cut.metrics["loss/policy"] == one.metrics["loss/policy"]
    assert cut.metrics["offpolicy/tokens"] == one.metrics["offpolicy/tokens"]
    for left, right in zip(*(made.model.parameters() for made in models), strict=True):
        # bfloat16 rounds the masters, which differ by their own rounding
        tolerance = 1e-6 if dtype == "float32" else 1e-2
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("correction", "counts_age"),
    [({}, False), ({"kind": "ppo"}, True), ({"anchor": "interpolate"}, True)],
)
def test_a_bound_on_the_movement_counts_the_age_of_data_only_without_a_computed_anchor(
    tiny, tmp_path, correction, counts_age
):
    settings = config(tiny, [StageConfig(kind="rl", steps=1)], minibatches=1)
    settings.correction = replace(settings.correction, **correction)
    settings.loss.target_kl, settings.learner.lr = 1e3, 1e-6
    made = updater(settings, tmp_path)
    outcome = made.step(
        "rl", stage_config(settings, 0), groups(2), LearnerState(lineage=1), FORKS, 1
    )
    age, moved = outcome.metrics["offpolicy/kl"], outcome.metrics["offpolicy/kl_moved"]
    assert age > 0.01
    assert moved == pytest.approx(age, rel=1e-2) if counts_age else 0 < moved < 1e-6


@pytest.mark.parametrize(
    ("anchor", "kls", "updates"),
    [("interpolate", (0.1, 0.1, 0.5, 0.15), 2), ("recompute", (0.1, 0.1, 0.5), 1)],
)
def test_an_update_before_other_data_that_are_beyond_the_bound_stays_if_these_can_be_old(
    tiny, tmp_path, monkeypatch, anchor, kls, updates
):
    settings = config(tiny, [StageConfig(kind="rl", steps=1)], minibatches=4)
    settings.loss.target_kl, settings.correction.anchor = 0.2, anchor
    made, told = updater(settings, tmp_path), iter(kls)
    monkeypatch.setattr(under_test.Accounting, "moved", lambda _: next(told))
    outcome = made.step(
        "rl", stage_config(settings, 0), groups(4), LearnerState(lineage=1), FORKS, 1
    )
    assert next(told, None) is None
    assert outcome.updates == updates == len(outcome.trained)
    assert len(outcome.filtered["target_kl"]) == 4 - updates
    assert outcome.metrics["learner/taken_back"] == 2 - updates
    assert outcome.metrics["offpolicy/kl_beyond"] == 0.5


@pytest.mark.parametrize(("lr", "alone", "updates"), [(1e-6, False, 2), (0.3, True, 1)])
def test_an_update_that_moves_old_data_beyond_the_bound_by_itself_is_taken_back(
    tiny, tmp_path, monkeypatch, lr, alone, updates
):
    """Data of a later update count by what the last update moved them, not by their age."""
    settings = config(tiny, [StageConfig(kind="rl", steps=1)], minibatches=4)
    settings.loss.target_kl, settings.correction.anchor = 0.2, "interpolate"
    settings.learner.lr = lr
    made, told, led = updater(settings, tmp_path), iter((0.1, 0.1, 0.5, 0.15)), list[float]()
    monkeypatch.setattr(under_test.Accounting, "moved", lambda _: next(told))
    since = Accounting.moved_since

    def moved_since(after: Accounting, before: Accounting) -> float:
        led.append(since(after, before))
        return led[-1]

    monkeypatch.setattr(under_test.Accounting, "moved_since", moved_since)
    kept = []
    retrace = under_test.retrace

    def traced(*given: Any, back: bool) -> None:
        kept.append([weight.detach().clone() for weight in made.model.parameters()])
        retrace(*given, back=back)

    monkeypatch.setattr(under_test, "retrace", traced)
    outcome = made.step(
        "rl", stage_config(settings, 0), groups(4), LearnerState(lineage=1), FORKS, 1
    )
    assert (led[0] > 0.2) == alone and led[0] > 0
    assert outcome.updates == updates == len(outcome.trained)
    assert outcome.metrics["learner/taken_back"] == 2 - updates
    before = kept[1] if alone else kept[0]  # the last update's weights without it, or with it
    for left, right in zip(made.model.parameters(), before, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize(("lr", "stays"), [(1e-6, True), (0.5, False)])
def test_an_update_on_data_beyond_the_bound_by_their_age_counts_by_what_it_moves_them(
    tiny, tmp_path, monkeypatch, minibatches, lr, stays
):
    """No version is published that it has moved too far, and one pass measures each movement."""
    settings = config(tiny, [StageConfig(kind="rl", steps=1)], minibatches=minibatches)
    settings.loss.target_kl, settings.correction.kind, settings.learner.lr = 0.2, "cispo", lr
    begin, made, data = updater(settings, tmp_path).model, updater(settings, tmp_path), groups(4)
    for group in data:
        group.trajectories[0].sequences[0].logprobs[1:] = -0.01  # of a policy that was sure
    measure, passes = made.stepper.passes.measure, []

    def measured(*given: Any, **more: Any) -> Accounting:
        passes.append(given)
        return measure(*given, **more)

    monkeypatch.setattr(made.stepper.passes, "measure", measured)
    found = made.step("rl", stage_config(settings, 0), data, LearnerState(lineage=1), FORKS, 1)
    assert found.updates == stays and found.metrics["learner/taken_back"] == 1 - stays
    assert len(passes) == (minibatches if stays else 1)
    if stays:
        assert found.metrics["offpolicy/kl"] > 1
        assert 0 <= found.metrics["offpolicy/kl_moved"] < 1e-6
        return
    assert found.metrics["offpolicy/kl_beyond"] > 1
    for one, other in zip(made.model.parameters(), begin.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("minibatches", "after"), [(1, 0.5), (2, 0.5), (1, math.nan)])
def test_the_last_update_of_a_step_is_taken_back_by_its_own_data(
    tiny, tmp_path, monkeypatch, minibatches, after
):
    """A policy whose only update is taken back is where it was: no version is published."""
    settings = config(tiny, [StageConfig(kind="rl", steps=1)], minibatches=minibatches)
    settings.loss.target_kl = 0.2
    begin, made = updater(settings, tmp_path).model, updater(settings, tmp_path)
    told, measured = iter([*[0.1] * minibatches, after]), []

    def moved_by(found: Accounting) -> float:
        measured.append(found.column("log_moved"))
        return next(told)

    monkeypatch.setattr(under_test.Accounting, "moved", moved_by)
    outcome = made.step(
        "rl", stage_config(settings, 0), groups(2), LearnerState(lineage=1), FORKS, 1
    )
    assert next(told, None) is None
    assert not outcome.metrics["offpolicy/kl_beyond"] <= 0.2
    assert outcome.metrics["learner/taken_back"] == 1
    assert outcome.updates == minibatches - 1 == len(outcome.trained)
    assert len(outcome.filtered["target_kl"]) == 2 // minibatches
    before, after = measured[-2:]
    assert len(before) == len(after) and not np.allclose(before, after), "of the moved policy"
    moved = [
        float((left - right).detach().abs().max())
        for left, right in zip(made.model.parameters(), begin.parameters(), strict=True)
    ]
    assert max(moved) < 1e-6 if minibatches == 1 else max(moved) > 1e-4


def test_a_target_kl_beyond_the_data_changes_nothing(tiny, tmp_path):
    found = []
    for target_kl in (math.inf, 1e6):
        settings = config(tiny, [StageConfig(kind="rl", steps=1)], minibatches=4)
        settings.loss.target_kl = target_kl
        made = updater(settings, tmp_path)
        made.step("rl", stage_config(settings, 0), groups(4), LearnerState(lineage=1), FORKS, 1)
        found.append(made.model)
    assert same(*found)


def test_a_checkpoint_gives_back_numbers_and_moments(tiny, tmp_path):
    settings = config(tiny, [StageConfig(kind="rl", steps=1)])
    made = updater(settings, tmp_path)
    asked = PendingEvaluation(version=2, changed_take=3, stage=0, episodes=8)
    state = LearnerState(lineage=1, take=3, changed_take=3, pending=[asked])
    assert made.step("rl", stage_config(settings, 0), groups(2), state, FORKS, 1).updates == 1
    (tmp_path / "c").mkdir()
    made.save(tmp_path / "c", state)
    again = updater(settings, tmp_path)
    assert again.restore(tmp_path / "c") == state
    for one, other in zip(made.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
        for slot, value in made.optimizer.state[one].items():
            assert torch.equal(value, again.optimizer.state[other][slot])


def test_moments_are_restored_to_the_device_of_their_parameter(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save_tensors(tmp_path, {}, {"optimizer": (model, optimizer)})
    elsewhere = torch.nn.Linear(2, 2, device="meta")  # any device but the file's
    target = torch.optim.AdamW(elsewhere.parameters())
    load_optimizer(elsewhere, target, tmp_path, "optimizer")
    slots = target.state[elsewhere.weight]
    assert {name: slot.device.type for name, slot in slots.items()} == {
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
        "step": "meta",
    }


# ---- guided members, labels, process rewards


def stripped_by_hand(data: list[Group]) -> list[Group]:
    for group in data:
        for one in group.trajectories:
            one.sequences = [stripped(sequence) for sequence in one.sequences]
    return data


def test_scorer_and_stepper_work_at_the_temperature_of_the_rollout(tiny, tmp_path):
    """Sampled by the very weights that are trained, every token has the weight and the ratio 1."""
    settings = config(tiny, [StageConfig(kind="rl", steps=3)], kl_coef=0.1)
    settings.rollout.temperature, settings.learner.lr = 0.6, 1e-9
    settings.learner.minibatches = 2  # what trains first gives its anchor itself
    made, data = updater(settings, tmp_path), groups(4)
    made.begin_stage(stage_config(settings, 0), 0)
    for group in data:
        (sequence,) = group.trajectories[0].sequences
        with torch.no_grad():
            tokens_BT = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
            logps_TV = (made.model(tokens_BT).logits[0] / 0.6).log_softmax(-1)
        acts = np.flatnonzero(sequence.roles == Role.ACTION)
        sequence.logprobs[acts] = logps_TV[acts - 1, sequence.tokens[acts]].numpy()
    result = step(made, data)
    metrics = result.metrics
    assert result.updates == 2 and result.data is not None
    scored = result.data.credit.logprobs
    for logprobs_N in (scored.anchor_N, scored.reference_N):
        np.testing.assert_allclose(logprobs_N, result.data.batch.mu_N, atol=1e-3)
    for name in ("w_q05", "w_q95", "r_q05", "r_q95"):
        assert metrics[f"offpolicy/{name}"] == pytest.approx(1.0, abs=1e-3), name
    assert metrics["offpolicy/kl"] == pytest.approx(0.0, abs=1e-5)


def test_anchor_for_guided_tokens_is_training_on_the_stripped_text_without_a_weight(tiny, tmp_path):
    """What AgentEvolver does: experience removed, mu forgotten. Bit for bit `none` by hand."""
    data = guided_groups(4)
    for group in data:
        group.trajectories = [one for one in group.trajectories if one.member % 2 == 0]
    ours = updater(guided_config(tiny, "strip", guided="anchor"), tmp_path)
    ours.config.loss.boost = 0.0
    step(ours, data)
    theirs = updater(guided_config(tiny, "strip", kind="none"), tmp_path)
    step(theirs, stripped_by_hand(data))
    assert same(ours.model, theirs.model)


def test_boost_reaches_the_weights_only_through_stripped_tokens(tiny, tmp_path):
    def weights_after(data: list[Group], boost: float) -> Updater:
        settings = guided_config(tiny, "strip", minibatches=4, guided="anchor")
        settings.loss = LossConfig(clip_high=1e-4, boost=boost)
        settings.learner.lr = 0.05
        made = updater(settings, tmp_path)
        outcome = step(made, data)
        if boost and made.config.experience.internalise == "strip":
            counted = outcome.metrics.get("boost/tokens", 0.0)
            assert (counted > 0) == any(
                s.guided for g in data for t in g.trajectories for s in t.sequences
            )
        return made

    boosted, usual = (weights_after(guided_groups(8), boost) for boost in (0.6, 0.0))
    assert not same(boosted.model, usual.model)
    boosted, usual = (
        weights_after(stripped_by_hand(guided_groups(8)), boost) for boost in (0.6, 0.0)
    )
    assert same(boosted.model, usual.model)


def test_without_internalising_a_step_keeps_the_experience_in_the_context(tiny, tmp_path):
    kept = updater(guided_config(tiny, "none"), tmp_path)
    outcome = step(kept, guided_groups(4))
    assert not any(name.startswith(("boost/", "offpolicy_guided/")) for name in outcome.metrics)
    assert outcome.metrics["experience/retrieved_share"] == 0.5
    as_prompt = guided_groups(4)
    for group in as_prompt:
        for one in group.trajectories:
            roles = one.sequences[0].roles
            roles[roles == Role.EXPERIENCE] = Role.PROMPT
    prompted = updater(guided_config(tiny, "none"), tmp_path)
    step(prompted, as_prompt)
    assert same(kept.model, prompted.model)


def test_guided_and_unguided_data_is_measured_apart(tiny, tmp_path):
    outcome = step(updater(guided_config(tiny, "strip"), tmp_path), guided_groups(4))
    found = outcome.metrics
    assert found["offpolicy_guided/tokens"] == found["offpolicy_unguided/tokens"] == 4 * 2 * 4
    assert found["offpolicy_guided/trajectories"] == 8
    assert found["experience/guided_success"] == found["experience/unguided_success"] == 0.5
    assert found["experience/guided_gain"] == 0.0
    assert not any("guided" in name or "experience" in name for name in unguided_metrics(tiny))


def unguided_metrics(tiny: Path) -> dict[str, float]:
    settings = config(tiny, [StageConfig(kind="rl", steps=1)])
    return (
        updater(settings, tiny)
        .step("rl", stage_config(settings, 0), groups(2), LearnerState(lineage=1), FORKS, 1)
        .metrics
    )


def test_unguided_data_costs_no_pass_beside_the_updates(tiny, tmp_path):
    """Whatever is configured; guided data costs one for its anchor and one in its own context."""

    def rows_scored(data: list[Group], **correction: Any) -> int:
        settings = guided_config(tiny, "strip", **correction)
        settings.rollout.guided_fraction = 0.0  # guided data is left from before
        settings.learner.packing = False  # so that a pass has as many rows as it scores
        made = updater(settings, tmp_path)
        rows = []

        def count(module: Any, inputs: Any, output: Any) -> None:
            if not torch.is_grad_enabled():
                rows.append(output.last_hidden_state.shape[0])

        policy.split_model(made.model)[0].register_forward_hook(count)
        step(made, data)
        return sum(rows)

    plain = stripped_by_hand(guided_groups(4))
    assert rows_scored(plain, kind="ppo") == 0
    assert rows_scored(plain, anchor="interpolate") == 0
    assert rows_scored(plain) == 8  # the second of two updates; the first scores its own rows
    assert rows_scored(guided_groups(4), kind="ppo") == 8 + 8
    assert rows_scored(guided_groups(4), kind="ppo", guided="anchor") == 8
    assert rows_scored(guided_groups(4), kind="ppo", guided="behaviour") == 0
    assert rows_scored(guided_groups(4)) == 16 + 8
    # no line of versions leads from one context to the other, so interpolation steps back
    assert rows_scored(guided_groups(4), anchor="interpolate") == 16 + 8


def test_an_own_estimator_gets_the_log_weights_that_it_declares(tiny, tmp_path):
    models = []
    for kind in ("opob", "learner.advantage.group_relative:_opob"):
        settings = config(tiny, [StageConfig(kind="rl", steps=1)])
        settings.advantage = AdvantageConfig(kind=kind, std="none")
        settings.correction.kind = "ppo"  # which reads no anchor
        made = updater(settings, tmp_path)
        drift(made.model)
        assert step(made, groups(4)).updates
        models.append(made.model)
    assert same(*models)


def test_the_running_baseline_goes_on_from_step_to_step(tiny, tmp_path):
    settings = config(tiny, [StageConfig(kind="rl", steps=9)])
    settings.advantage = AdvantageConfig(kind="reinforce", baseline_decay=0.75)
    made, state, baseline = updater(settings, tmp_path), LearnerState(lineage=1), 0.0
    for _ in range(3):
        outcome = made.step("rl", stage_config(settings, 0), groups(4), state, FORKS, 9)
        assert outcome.data is not None
        batch = outcome.data.batch
        expected_N = batch.reward_P[batch.trajectory_N] - baseline
        np.testing.assert_allclose(
            outcome.data.credit.advantages.advantage_N, expected_N, rtol=1e-6
        )
        baseline = 0.75 * baseline + 0.25 * 0.5
        assert state.baseline == pytest.approx(baseline)


@correction(reads_anchor=False, clips=False)
def unscaled(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """vcpo without its scaled rate."""
    return vcpo(tokens, settings)


def test_vcpo_moves_at_a_rate_that_is_scaled_by_the_effective_sample_size(tiny, tmp_path):
    """As slow: the same loss at the rate that a loop over the trajectories gives."""

    def trained(kind: str, lr: float) -> tuple[Updater, dict[str, float], list[float]]:
        settings = config(tiny, [StageConfig(kind="rl", steps=3)])
        settings.correction = CorrectionConfig(kind=kind, w_max=8.0)
        settings.learner.lr = lr
        made, data, log_weights = updater(settings, tmp_path), groups(4), []
        for number, group in enumerate(data):
            (sequence,) = group.trajectories[0].sequences
            acts = np.flatnonzero(sequence.roles == Role.ACTION)
            sequence.logprobs[acts] -= 0.5 * number  # the later ones were the less likely
            with torch.no_grad():
                tokens_BT = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
                logps_TV = made.model(tokens_BT).logits[0].log_softmax(-1)
            theta = logps_TV[acts - 1, sequence.tokens[acts]].numpy()
            log_weights.append(float((theta - sequence.logprobs[acts]).sum()))
        return made, step(made, data).metrics, log_weights

    made, metrics, log_weights = trained("vcpo", 1e-2)
    weights = [math.exp(one) for one in log_weights]
    scale = math.sqrt(sum(weights) ** 2 / (4 * sum(one**2 for one in weights)))
    assert metrics["learner/lr_scale"] == pytest.approx(scale, rel=1e-4) and scale < 0.9
    plain, found, _ = trained(f"{__name__}:unscaled", 1e-2 * scale)
    assert "learner/lr_scale" not in found
    for one, other in zip(made.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_the_kl_of_distillation_is_the_mean_over_what_is_taught(tiny, tmp_path):
    """Updates without guided members count for nothing."""

    def distilled(minibatches: int) -> float:
        settings = guided_config(tiny, "distill", minibatches=minibatches)
        settings.learner.lr = 1e-12
        data = guided_groups(4)
        data[1:] = stripped_by_hand(data[1:])
        return step(updater(settings, tmp_path), data).metrics["experience/distill_kl"]

    whole = distilled(1)
    assert whole > 0
    assert distilled(4) == pytest.approx(whole, rel=1e-4)


def test_labels_and_their_outage_are_measured_and_alpha_falls(tiny, tmp_path):
    settings = guided_config(tiny, "strip")
    settings.advantage = AdvantageConfig(kind="adca", alpha=0.4, alpha_final=0.0)
    settings.judge = JudgeConfig(kind="rule")
    data = guided_groups(4)
    found = step(updater(settings, tmp_path), data).metrics
    assert found["judge/labelled_share"] == 1 and found["judge/good_share"] == 5 / 8
    assert found["advantage/unlabelled_groups"] == 0 and found["advantage/alpha"] == 0.4
    data[1].trajectories[2].labels[:] = 0
    made = updater(settings, tmp_path)
    outcome = step(made, data, take=1)
    assert outcome.metrics["advantage/unlabelled_groups"] == 1
    assert outcome.metrics["advantage/alpha"] == pytest.approx(0.2)
    assert outcome.data is not None
    batch, advantage_N = outcome.data.batch, outcome.data.credit.advantages.advantage_N
    by_turn = {}
    for p, k, A in zip(batch.trajectory_N, batch.turn_N, advantage_N, strict=True):
        by_turn.setdefault((int(p), int(k)), set()).add(float(A))
    assert all(len(values) == 1 for values in by_turn.values())  # one a turn
    for p in range(16):
        falls_back = batch.group_P[p] == 1
        assert (by_turn[p, 0] == by_turn[p, 1]) == falls_back
        if falls_back:
            (found_A,) = by_turn[p, 1]
            assert found_A == pytest.approx(1.0 if p % 4 > 1 else -1.0, rel=1e-4)


def test_a_resume_repeats_a_guided_step_bit_for_bit(tiny, tmp_path):
    settings = guided_config(tiny, "strip")
    settings.experience.strip_fraction = 0.5
    settings.advantage = AdvantageConfig(kind="grpo_process")
    made = updater(settings, tmp_path)
    step(made, guided_groups(4))
    (tmp_path / "c").mkdir()
    made.save(tmp_path / "c", LearnerState())
    again = updater(settings, tmp_path)
    again.restore(tmp_path / "c")
    results = [step(one, guided_groups(4), take=1).metrics for one in (made, again)]
    assert results[0] == results[1] and same(made.model, again.model)


def oracle(rewards: Rewards, given: EstimatorInput, settings: AdvantageConfig) -> Any:
    """Advantages that are parameters, by trajectory."""
    return np.array(settings.params["values"])[rewards.trajectory_U], given.baseline


def masked_config(tiny: Path, **changes: Any) -> Any:
    settings = guided_config(tiny, "none", minibatches=1)
    settings.experience.kind = "none"
    settings.loss = replace(settings.loss, **changes)
    return settings


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum_norm"])
@pytest.mark.parametrize("rows", ["trees", "packed", "padded"])
def test_a_masked_episode_gives_no_gradient_and_counts_in_its_groups_baseline(
    tiny, tmp_path, aggregation, rows
):
    """As slow: the step on the others alone, with advantages computed by hand from all."""
    data = guided_groups(2)
    for group in data:
        for one in group.trajectories[1:]:  # they share a beginning, as members do
            one.sequences[0].tokens[:2] = group.trajectories[1].sequences[0].tokens[:2]
        group.trajectories[3].turn_flags[-1] = TurnFlag.CUT
        group.trajectories[2].turn_flags[0] = TurnFlag.CUT  # not the last turn: it trains
    settings = masked_config(tiny, mask_truncated=True, aggregation=aggregation)
    settings.learner.packing = rows != "padded"
    settings.learner.prefix_trees = "always" if rows == "trees" else "never"
    made = updater(settings, tmp_path)
    result = step(made, data)
    assert result.metrics["train/masked_truncated"] == 0.25

    values = []
    for group in data:
        rewards = np.array([one.reward for one in group.trajectories])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        values += advantages[:3].tolist()
        group.trajectories = group.trajectories[:3]
    again = masked_config(tiny, aggregation=aggregation)
    again.learner.packing, again.learner.prefix_trees = False, "never"
    again.advantage = AdvantageConfig(kind=f"{__name__}:oracle", params={"values": values})
    slow = updater(again, tmp_path)
    expected = step(slow, data)
    assert result.metrics["loss/policy"] == pytest.approx(expected.metrics["loss/policy"], rel=1e-4)
    assert result.tokens == expected.tokens and result.trained == expected.trained
    for name, tensor in policy.state_tensors(slow.model).items():
        assert torch.allclose(policy.state_tensors(made.model)[name], tensor, atol=1e-5), name


def test_a_group_of_masked_episodes_alone_is_filtered_as_truncated(tiny, tmp_path):
    data = guided_groups(2)
    for one in data[1].trajectories:
        one.turn_flags[-1] = TurnFlag.FULL
    made = updater(masked_config(tiny, mask_truncated=True), tmp_path)
    result = step(made, data)
    assert result.trained == [data[0].group_id]
    assert result.filtered == {"truncated": [data[1].group_id]}
    before = {name: one.clone() for name, one in policy.state_tensors(made.model).items()}
    nothing = step(made, data[1:], take=1)
    assert (nothing.updates, nothing.trained) == (0, [])
    after = policy.state_tensors(made.model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_switched_off_the_mask_is_inert(tiny, tmp_path):
    data = guided_groups(2)
    data[0].trajectories[3].turn_flags[-1] = TurnFlag.CUT
    made = updater(masked_config(tiny), tmp_path)
    result = step(made, data)
    assert len(result.trained) == 2 and "train/masked_truncated" not in result.metrics
