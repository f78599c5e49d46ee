"""The bound on the cosine of consecutive gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from updates import FORKS, config, groups, tiny, updater

from evolver_async.config import CorrectionConfig, StageConfig
from evolver_async.config.load import stage_config
from learner.optimize.adamw import make_adamw, update
from learner.optimize.alignment import align, forget, remember
from learner.state import LearnerState
from learner.step import Updater

__all__ = ["tiny"]  # the fixture

BETAS = (0.9, 0.95)


def two_weights() -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    weights = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]
    return weights, make_adamw(weights, betas=BETAS, eps=1e-8, weight_decay=0.0)


def give(weights: list[torch.nn.Parameter], gradient: np.ndarray) -> None:
    first, second = weights
    first.grad = torch.tensor(gradient[:6].reshape(2, 3), dtype=torch.float32)
    second.grad = torch.tensor(gradient[6:], dtype=torch.float32)


def held(weights: list[torch.nn.Parameter]) -> np.ndarray:
    grads = [weight.grad.numpy().ravel() for weight in weights if weight.grad is not None]
    return np.concatenate(grads).astype(np.float64)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))


def after(first: np.ndarray) -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    """Weights that have been moved once, by gradient `first`."""
    weights, optimizer = two_weights()
    give(weights, first)
    _, kept = align(optimizer, 0.5)
    update([(optimizer, 0.1)], loss=1.0, grad_clip=1.0)
    remember(optimizer, kept)
    return weights, optimizer


@given(seed=st.integers(0, 10**6), pull=st.floats(-3, 3), bound=st.floats(0, 0.99))
def test_a_gradient_along_the_last_one_keeps_what_is_orthogonal(seed, pull, bound):
    random = np.random.default_rng(seed)
    first = random.normal(size=10)
    second = random.normal(size=10) + pull * first
    weights, optimizer = after(first)
    give(weights, second)
    found, _ = align(optimizer, bound)
    expected = cosine(first, second)
    assert found == pytest.approx(expected, abs=1e-5)
    changed = held(weights)
    if expected <= bound:
        np.testing.assert_array_equal(changed, second.astype(np.float32))
        return
    assert cosine(first, changed) == pytest.approx(bound, abs=1e-4)
    unit = first / np.linalg.norm(first)
    across = second - (second @ unit) * unit
    np.testing.assert_allclose(changed - (changed @ unit) * unit, across, atol=1e-4)


def test_the_first_gradient_and_one_after_a_stage_stay() -> None:
    weights, optimizer = after(np.ones(10))
    forget(optimizer)
    give(weights, np.ones(10))
    assert align(optimizer, 0.0)[0] == 0.0
    np.testing.assert_array_equal(held(weights), np.ones(10))


def test_what_is_remembered_is_the_gradient_before_its_alignment_and_its_clipping() -> None:
    weights, optimizer = after(np.ones(10))
    tilted = np.ones(10)
    tilted[0] = 3.0
    give(weights, tilted)
    found, kept = align(optimizer, 0.0)
    assert found > 0.8 and cosine(held(weights), np.ones(10)) == pytest.approx(0.0, abs=1e-6)
    update([(optimizer, 0.1)], loss=1.0, grad_clip=1e-3)
    remember(optimizer, kept)
    give(weights, tilted)
    assert align(optimizer, 0.5)[0] == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_left_to_the_guard_of_the_update(bad: float) -> None:
    weights, optimizer = after(np.ones(10))
    gradient = np.ones(10)
    gradient[3] = bad
    give(weights, gradient)
    assert align(optimizer, 0.0)[0] == 0.0
    (done,) = update([(optimizer, 0.1)], loss=1.0, grad_clip=1.0)
    assert not done.applied
    give(weights, np.ones(10))  # the gradient before is still that of the update before
    assert align(optimizer, 0.5)[0] == pytest.approx(1.0)


def take(made: Updater, state: LearnerState) -> dict[str, float]:
    outcome = made.rl(stage_config(made.config, 0), groups(4), state, FORKS, 9)
    state.take += 1
    return outcome.metrics


def test_a_step_measures_the_cosine_and_a_checkpoint_goes_on_bitwise(tiny, tmp_path) -> None:
    settings = config(tiny, [StageConfig(kind="rl", steps=9)], minibatches=2)
    settings.correction = CorrectionConfig(max_cosine=0.05)
    made, state = updater(settings, tmp_path), LearnerState(lineage=1)
    take(made, state)
    (tmp_path / "c").mkdir()
    made.save(tmp_path / "c", state)
    again = updater(settings, tmp_path)
    state_again = again.restore(tmp_path / "c")
    rows = take(made, state), take(again, state_again)
    assert rows[0] == rows[1]
    assert rows[0]["loss/grad_cosine"] != 0
    settings.correction.max_cosine = 1.0
    assert "loss/grad_cosine" not in take(made, state)


def test_a_stage_forgets_the_gradients_of_the_one_before(tiny, tmp_path) -> None:
    settings = config(tiny, [StageConfig(kind="rl", steps=9)] * 2)
    settings.correction = CorrectionConfig(max_cosine=0.5)
    made, state = updater(settings, tmp_path), LearnerState(lineage=1)
    take(made, state)
    made.begin_stage(stage_config(settings, 1), 1)
    assert take(made, state)["loss/grad_cosine"] == 0
    assert take(made, state)["loss/grad_cosine"] != 0


def test_same_data_again_is_held_back(tiny, tmp_path) -> None:
    """The same groups twice give gradients that point the same way."""
    moved = {}
    for bound in (1.0, 0.0):
        settings = config(tiny, [StageConfig(kind="rl", steps=9)])
        settings.correction = CorrectionConfig(max_cosine=bound)
        made, state = updater(settings, tmp_path), LearnerState(lineage=1)
        take(made, state)
        found = take(made, state)
        moved[bound] = found["loss/grad_norm"]
        if bound == 0:
            assert found["loss/grad_cosine"] > 0.2
    assert moved[0.0] < 0.98 * moved[1.0]
