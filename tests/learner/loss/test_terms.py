"""The clipped objective, KL estimators and aggregations against loops and closed forms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.loss.terms import (
    boosted,
    clipped_objective,
    kl_estimate,
    policy_loss,
    token_scale,
    unclipped_objective,
)


@given(
    st.floats(0.01, 10), st.floats(-3, 3), st.floats(0.05, 0.9), st.floats(0.05, 2), st.floats(1, 5)
)
def test_clipping_matches_the_formula(x, A, low, high, dual):
    clipped = clipped_objective(
        torch.tensor([x], dtype=torch.float64),
        torch.tensor([A], dtype=torch.float64),
        clip_low=low,
        clip_high=high,
        dual_clip=max(dual, 1 + high),
    )
    expected = min(x * A, min(max(x, 1 - low), 1 + high) * A)
    if A < 0:
        expected = max(expected, max(dual, 1 + high) * A)
    assert float(clipped.objective_N) == pytest.approx(expected, rel=1e-9)
    assert not (clipped.low_N & clipped.high_N).any()


def test_a_bounded_token_has_no_gradient_and_a_free_one_has_all_of_it():
    x_N = torch.tensor([0.5, 0.5, 2.0, 2.0, 5.0, 1.0], requires_grad=True)
    A_N = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 0.0])
    clipped = clipped_objective(x_N, A_N, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    (gradient_N,) = torch.autograd.grad(clipped.objective_N.sum(), x_N)
    assert gradient_N.tolist() == [1, 0, 0, -1, 0, 0]
    assert clipped.low_N.tolist() == [False, True, False, False, False, False]
    assert clipped.high_N.tolist() == [False, False, True, False, True, False]


def test_an_unclipped_token_always_has_its_gradient():
    x_N = torch.tensor([-7.0, 0.1, 50.0], requires_grad=True)
    A_N = torch.tensor([1.0, -2.0, -1.0])
    found = unclipped_objective(x_N, A_N)
    (gradient_N,) = torch.autograd.grad(found.objective_N.sum(), x_N)
    assert torch.equal(gradient_N, A_N)
    assert not (found.low_N | found.high_N).any()


def test_the_upper_bound_may_differ_by_token():
    x_N = torch.tensor([1.5, 1.5])
    clipped = clipped_objective(
        x_N, torch.ones(2), clip_low=0.2, clip_high=torch.tensor([0.28, 0.6]), dual_clip=3.0
    )
    torch.testing.assert_close(clipped.objective_N, torch.tensor([1.28, 1.5]))
    assert clipped.high_N.tolist() == [True, False]


def test_a_boost_frees_what_lies_between_the_bounds_and_no_bad_token():
    x_N = torch.tensor([1.2, 1.4, 1.8, 1.4, 1.4, 0.1])
    A_N = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, 1.0])
    stripped_N = torch.tensor([True, True, True, True, False, True])
    found = boosted(x_N, A_N, stripped_N, clip_high=0.28, boost=0.6)
    assert found.tokens_N.tolist() == [True, True, True, False, False, True]
    assert found.freed_N.tolist() == [False, True, False, False, False, False]
    assert found.bound_N.tolist() == [False, False, True, False, False, False]


@given(st.floats(0.01, 10), st.floats(-3, 3), st.booleans())
def test_freed_tokens_are_exactly_those_whose_gradient_the_boost_gives_back(x, A, stripped):
    def reached(clip_high: float) -> bool:
        x_N = torch.tensor([x], dtype=torch.float64, requires_grad=True)
        A_N = torch.tensor([A], dtype=torch.float64)
        clipped = clipped_objective(x_N, A_N, clip_low=0.2, clip_high=clip_high, dual_clip=3.0)
        (gradient,) = torch.autograd.grad(clipped.objective_N.sum(), x_N)
        return bool(gradient.abs() > 0)

    found = boosted(
        torch.tensor([x], dtype=torch.float64),
        torch.tensor([A], dtype=torch.float64),
        torch.tensor([stripped]),
        clip_high=0.28,
        boost=0.6,
    )
    assert bool(found.freed_N) == (stripped and reached(0.6) and not reached(0.28))
    if stripped and A > 0:
        assert bool(found.bound_N) == (not reached(0.6))


def test_kl_estimators_agree_with_the_exact_kl_of_a_categorical():
    theta = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()
    exact = float((theta.exp() * (theta - reference)).sum())
    expected = {
        kind: float((theta.exp() * kl_estimate(kind, theta, reference)).sum())
        for kind in ("k1", "k2", "k3")
    }
    assert expected["k1"] == pytest.approx(exact)
    assert expected["k3"] == pytest.approx(exact)
    assert expected["k2"] == pytest.approx(exact, rel=0.1)  # biased, to second order right
    assert (kl_estimate("k3", theta, reference) >= 0).all()


@given(st.sampled_from(["k1", "k2", "k3"]), st.floats(-200, 0), st.floats(-200, 0))
def test_kl_estimators_match_the_formula_and_never_push_away_from_the_reference(
    kind, theta, reference
):
    theta_N = torch.tensor([theta], dtype=torch.float64, requires_grad=True)
    found_N = kl_estimate(kind, theta_N, torch.tensor([reference], dtype=torch.float64))
    d = min(max(reference - theta, -20.0), 20.0)
    k3 = min(math.exp(d) - 1 - d, 10.0)
    expected = {"k1": -d, "k2": d * d / 2, "k3": k3}[kind]
    assert float(found_N.detach()) == pytest.approx(expected, rel=1e-12, abs=1e-12)

    (gradient_N,) = torch.autograd.grad(found_N.sum(), theta_N)
    slope = {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(d)}[kind]  # d falls as theta rises
    held = abs(reference - theta) > 20 or (kind == "k3" and math.exp(d) - 1 - d > 10)
    assert float(gradient_N) == pytest.approx(0.0 if held else slope, rel=1e-12, abs=1e-12)
    if kind != "k1":  # descent moves theta towards the reference, or not at all
        assert float(gradient_N) * (theta - reference) >= 0


@pytest.mark.parametrize("reference", [-60.0, -21.0, -1e-3, 21.0, 60.0])
def test_a_ratio_to_the_reference_beyond_the_bound_moves_no_token(reference):
    theta_N = torch.zeros(1, requires_grad=True)
    found_N = kl_estimate("k3", theta_N, torch.tensor([reference]))
    (gradient_N,) = torch.autograd.grad(found_N.sum(), theta_N)
    assert (float(gradient_N) == 0) == (abs(reference) > 20)


def test_k2_has_the_gradient_of_the_exact_kl():
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()
    theta = logits.log_softmax(-1)
    p = theta.detach().exp()
    (exact,) = torch.autograd.grad(
        (theta.exp() * (theta - reference)).sum(), logits, retain_graph=True
    )
    (found,) = torch.autograd.grad((p * kl_estimate("k2", theta, reference)).sum(), logits)
    torch.testing.assert_close(found, exact)


lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(lengths, st.integers(0, 10**6))
def test_aggregations_match_the_loops(lengths_P, seed):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.rand(n, generator=generator) for n in lengths_P]
    x_N = torch.cat(values)
    length_N = torch.tensor([n for n in lengths_P for _ in range(n)])
    P, N = len(lengths_P), sum(lengths_P)
    expected = {
        "token_mean": sum(float(v) for x in values for v in x) / N,
        "sequence_mean": sum(float(x.sum()) / len(x) for x in values) / P,
        "sequence_sum_norm": sum(float(x.sum()) for x in values) / (P * 7),
    }
    for aggregation, value in expected.items():
        scale_N = token_scale(aggregation, length_N, tokens=N, trajectories=P, norm_tokens=7)
        assert float((scale_N * x_N).sum()) == pytest.approx(value, rel=1e-5)


def summed(scale_N):
    """The loss of all three terms with its parts, after a comparison with their sum."""
    objective_N, kl_N, entropy_N = torch.rand(3, len(scale_N))
    loss, terms = policy_loss(
        objective_N,
        scale_N,
        kl_N=kl_N,
        kl_coef=0.1,
        entropy_N=entropy_N,
        entropy_coef=0.01,
        tokens=len(scale_N),
    )
    expected = (scale_N * (-objective_N + 0.1 * kl_N - 0.01 * entropy_N)).sum()
    torch.testing.assert_close(loss, expected)
    return loss, terms


def test_the_loss_is_the_sum_of_its_terms():
    loss, terms = summed(torch.full((4,), 0.25))
    assert terms["loss/policy"] + 0.1 * terms["loss/kl"] - 0.01 * terms[
        "loss/entropy"
    ] == pytest.approx(float(loss))


def test_entropy_is_reported_per_token_whatever_the_aggregation():
    """The alarm's floor is in nats per token: a constant length must not look like a collapse."""
    entropy_N, scale_N = torch.rand(6), torch.full((6,), 1 / (2 * 1024))
    _, terms = policy_loss(
        torch.rand(6),
        scale_N,
        kl_N=None,
        kl_coef=0.0,
        entropy_N=entropy_N,
        entropy_coef=0.01,
        tokens=6,
    )
    assert terms["loss/entropy"] == pytest.approx(float(entropy_N.mean()))


def test_every_term_of_the_loss_is_weighted_by_the_aggregation():
    summed(torch.rand(6))


def test_a_term_that_is_switched_off_cannot_reach_the_loss():
    infinite = torch.full((2,), math.inf)
    loss, terms = policy_loss(
        torch.ones(2),
        torch.full((2,), 0.5),
        kl_N=None,
        kl_coef=0.0,
        entropy_N=infinite,
        entropy_coef=0.0,
        tokens=2,
    )
    assert float(loss) == -1 and "loss/kl" not in terms
