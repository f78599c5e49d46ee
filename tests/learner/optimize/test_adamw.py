"""The schedule's values, AdamW's behaviour at the edges, and the guard."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evolver_async.config import LearnerConfig
from evolver_async.config.sections import learner
from learner.optimize.adamw import make_adamw, retrace, take_back, update, with_gradient

SCHEDULE: dict[str, Any] = {
    "lr": 1.0,
    "warmup_steps": 5,
    "steps": 105,
    "decay_start": 0.0,
    "lr_final": 0.1,
}


def lr_at(step: int, *, steps: int, **settings: Any) -> float:
    return learner.lr_at(step, LearnerConfig(**settings), steps=steps)


def make() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, make_adamw(model.parameters(), betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


def test_warm_up_rises_linearly_to_the_rate():
    rates = [lr_at(step, decay="none", **SCHEDULE) for step in range(7)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


def test_linear_decay_ends_at_the_final_share():
    assert lr_at(4, decay="linear", **SCHEDULE) == 1.0
    assert lr_at(54, decay="linear", **SCHEDULE) == pytest.approx(0.55)
    assert lr_at(104, decay="linear", **SCHEDULE) == pytest.approx(0.1)
    assert lr_at(500, decay="linear", **SCHEDULE) == pytest.approx(0.1)


def test_cosine_decay_is_half_way_down_in_the_middle():
    assert lr_at(54, decay="cosine", **SCHEDULE) == pytest.approx(0.55)
    assert lr_at(29, decay="cosine", **SCHEDULE) == pytest.approx(
        1 - 0.9 * (1 - math.cos(math.pi / 4)) / 2
    )
    assert lr_at(104, decay="cosine", **SCHEDULE) == pytest.approx(0.1)


def test_decay_starts_where_it_is_told_to():
    late: dict[str, Any] = SCHEDULE | {"decay_start": 0.6}
    assert lr_at(62, decay="linear", **late) == 1.0
    assert lr_at(63, decay="linear", **late) < 1.0


def test_a_stage_without_a_bound_does_not_decay():
    assert lr_at(10**6, decay="linear", **{**SCHEDULE, "steps": 0}) == 1.0


@given(
    st.integers(0, 60),
    st.integers(0, 20),
    st.integers(0, 50),
    st.sampled_from(["none", "linear", "cosine"]),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_the_rate_never_leaves_its_range(step, warmup, steps, decay, start, final):
    numbers: dict[str, Any] = {"warmup_steps": warmup, "steps": steps, "decay": decay}
    rate = lr_at(step, lr=2.0, decay_start=start, lr_final=final, **numbers)
    assert 0 <= rate <= 2.0 + 1e-12
    if step >= warmup:
        following = lr_at(step + 1, lr=2.0, decay_start=start, lr_final=final, **numbers)
        assert following <= rate + 1e-12 and rate >= 2.0 * final - 1e-12


def test_a_step_moves_the_weights_and_reports_the_norm_before_clipping():
    model, optimizer = make()
    before = model.weight.detach().clone()
    loss = 100 * model(torch.ones(4, 3)).sum()
    loss.backward()
    norm = math.sqrt(
        sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)
    )
    (done,) = update([(optimizer, 1e-2)], loss=float(loss.detach()), grad_clip=0.5)
    assert done.applied and done.grad_norm == pytest.approx(norm)
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is None


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_non_finite_step_leaves_weights_and_moments_untouched(bad):
    model, optimizer = make()
    model(torch.ones(1, 3)).sum().backward()
    update([(optimizer, 1e-2)], loss=0.0, grad_clip=1.0)
    weights = [p.detach().clone() for p in model.parameters()]
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]

    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    if bad == "gradient":
        model.weight.grad[0, 0] = math.nan
    loss = math.inf if bad == "loss" else 0.0
    assert not update([(optimizer, 1e-2)], loss=loss, grad_clip=1.0)[0].applied
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    after = [s["exp_avg"] for s in optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    assert model.weight.grad is None


def test_only_matrices_decay():
    model, optimizer = make()
    before = model.bias.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight = model.weight.detach().clone()
    update([(optimizer, 0.1)], loss=0.0, grad_clip=1.0)
    assert torch.equal(model.bias, before)
    torch.testing.assert_close(model.weight.detach(), weight * (1 - 0.1 * 0.1))


def test_gradients_beyond_the_bound_are_scaled_down_to_it():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert update([(sgd, 1.0)], loss=0.0, grad_clip=0.5)[0].grad_norm == pytest.approx(5)
    torch.testing.assert_close(before - model.weight.detach(), torch.tensor([[0.3, 0.4]]))


@pytest.mark.parametrize("bad", [0, 1])
def test_of_several_optimizers_all_move_or_none(bad):
    pairs = [make(), make()]
    moves = [(optimizer, 10.0**-index) for index, (_, optimizer) in enumerate(pairs)]
    before = pairs[0][0].weight.detach().clone()
    for model, _ in pairs:
        model(torch.ones(1, 3)).sum().backward()
    assert all(done.applied for done in update(moves, loss=0.0, grad_clip=0.1))
    far, near = (float((before - model.weight.detach()).abs().max()) for model, _ in pairs)
    assert far == pytest.approx(10 * near, rel=1e-3)  # each at its own rate
    weights = [model.weight.detach().clone() for model, _ in pairs]
    for model, _ in pairs:
        model(torch.ones(1, 3)).sum().backward()
    assert pairs[bad][0].weight.grad is not None
    pairs[bad][0].weight.grad[0, 0] = math.nan
    assert not any(done.applied for done in update(moves, loss=0.0, grad_clip=0.1))
    for (model, _), weight in zip(pairs, weights, strict=True):
        assert torch.equal(model.weight, weight) and model.weight.grad is None


def test_what_is_taken_back_is_where_it_was_and_has_lost_its_momentum():
    model, optimizer = make()
    still = torch.nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [still], "weight_decay": 0.5})
    for number in range(4):
        for weight in (*model.parameters(), *([still] if number == 1 else [])):
            weight.grad = torch.randn_like(weight)
        moved = with_gradient(optimizer)
        before = [weight.detach().clone() for weight in (*model.parameters(), still)]
        update([(optimizer, 0.3)], loss=1.0, grad_clip=1.0)
    assert moved == list(model.parameters())
    far = [
        float((weight - old).detach().abs().max())
        for weight, old in zip(moved, before, strict=False)
    ]
    assert min(far) > 0.01
    second = [optimizer.state[weight]["exp_avg_sq"].clone() for weight in moved]
    after = [weight.detach().clone() for weight in moved]
    retrace(optimizer, moved, 0.3, back=True)
    for weight, old in zip((*moved, still), before, strict=True):
        torch.testing.assert_close(weight.detach(), old, rtol=1e-6, atol=1e-6)
    retrace(optimizer, moved, 0.3, back=False)
    for weight, old in zip((*moved, still), (*after, before[-1]), strict=True):
        torch.testing.assert_close(weight.detach(), old, rtol=1e-6, atol=1e-6)
    take_back(optimizer, moved, 0.3)
    for weight, old in zip((*moved, still), before, strict=True):
        torch.testing.assert_close(weight.detach(), old, rtol=1e-6, atol=1e-6)
    assert not any(optimizer.state[weight]["exp_avg"].any() for weight in moved)
    assert optimizer.state[still]["exp_avg"].any(), "it did not move"
    for weight, squares in zip(moved, second, strict=True):
        assert torch.equal(optimizer.state[weight]["exp_avg_sq"], squares)
