"""The corrections against loops in the notation of the algorithms page, and identities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.loss import clipped_objective
from learner.offpolicy import (
    correct,
    guided_old,
    interpolated_anchor,
    log_rho,
    needs_anchor_pass,
    trajectory_sum,
)

KINDS = [("none", "token"), ("ppo", "token"), ("decoupled", "token"), ("decoupled", "trajectory")]


def draw(seed: int, tokens: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mu_N = -torch.rand(tokens, generator=generator, dtype=torch.float64) * 4
    anchor_N = mu_N + 0.4 * torch.randn(tokens, generator=generator, dtype=torch.float64)
    theta_N = anchor_N + 0.4 * torch.randn(tokens, generator=generator, dtype=torch.float64)
    return {
        "theta_N": theta_N.requires_grad_(),
        "old_N": mu_N,
        "anchor_N": anchor_N,
        "trajectory_N": torch.randint(0, 5, (tokens,), generator=generator),
    }


def advantage(seed: int, tokens: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(tokens, generator=generator, dtype=torch.float64)


def gradient(objective: torch.Tensor, theta_N: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(objective.sum(), theta_N)
    return found


@pytest.mark.parametrize(("kind", "level"), KINDS)
@given(seed=st.integers(0, 10**6), w_max=st.sampled_from([1.2, 2.0, math.inf]))
@settings(deadline=None, max_examples=25)
def test_objective_matches_the_loop(kind, level, seed, w_max):
    low, high, dual = 0.2, 0.28, 3.0
    data, A_N = draw(seed), advantage(seed)
    corrected = correct(**data, kind=kind, level=level, w_max=w_max)
    found = (
        corrected.weight_N
        * clipped_objective(
            corrected.ratio_N, A_N, clip_low=low, clip_high=high, dual_clip=dual
        ).objective_N
    )

    found_N = found.detach()
    theta, mu, anchor, member = (values.tolist() for values in data.values())
    for t in range(len(theta)):
        A = float(A_N[t])
        r, q = math.exp(theta[t] - anchor[t]), math.exp(theta[t] - mu[t])
        w = math.exp(anchor[t] - mu[t])
        W = 1.0
        for u in range(len(theta)):
            if member[u] == member[t]:
                W *= math.exp(anchor[u] - mu[u])

        def L(x: float, A: float = A) -> float:
            value = min(x * A, min(max(x, 1 - low), 1 + high) * A)
            return max(value, dual * A) if A < 0 else value

        expected = {
            "none": L(r),
            "ppo": L(q),
            "decoupled": min(w if level == "token" else W, w_max) * L(r),
        }[kind]
        assert float(found_N[t]) == pytest.approx(expected, rel=1e-9)
        assert float(corrected.w_N[t]) == pytest.approx(q if kind == "ppo" else w)
        assert float(corrected.r_N[t]) == pytest.approx(q if kind == "ppo" else r)


def test_without_lag_all_corrections_are_the_same():
    data, A_N = draw(0), advantage(0)
    data["anchor_N"] = data["old_N"]
    results = []
    for kind, level in KINDS:
        corrected = correct(**data, kind=kind, level=level, w_max=math.inf)
        objective_N = (
            corrected.weight_N
            * clipped_objective(
                corrected.ratio_N, A_N, clip_low=0.2, clip_high=0.28, dual_clip=3.0
            ).objective_N
        )
        results.append((objective_N.detach(), gradient(objective_N, data["theta_N"])))
    for objective_N, gradient_N in results[1:]:
        assert torch.equal(objective_N, results[0][0])
        assert torch.equal(gradient_N, results[0][1])


def test_ratio_one_gives_the_plain_policy_gradient():
    data, A_N = draw(1), advantage(1)
    data["anchor_N"] = data["old_N"] = data["theta_N"].detach()
    for kind, level in KINDS:
        corrected = correct(**data, kind=kind, level=level, w_max=2.0)
        objective_N = (
            corrected.weight_N
            * clipped_objective(
                corrected.ratio_N, A_N, clip_low=0.2, clip_high=0.28, dual_clip=3.0
            ).objective_N
        )
        plain = gradient(A_N * data["theta_N"], data["theta_N"])
        assert torch.equal(gradient(objective_N, data["theta_N"]), plain)


def test_unbounded_decoupled_weights_give_the_importance_weighted_gradient():
    data, A_N = draw(2), advantage(2)
    corrected = correct(**data, kind="decoupled", level="token", w_max=math.inf)
    found = gradient(corrected.weight_N * corrected.ratio_N * A_N, data["theta_N"])
    q_N = (data["theta_N"] - data["old_N"]).detach().exp()
    torch.testing.assert_close(found, q_N * A_N)


def test_interpolated_anchor_follows_the_lag():
    theta_N = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    mu_N = torch.tensor([-2.0, -2.0, -2.0])
    anchor_N = interpolated_anchor(theta_N, mu_N, torch.tensor([0, 1, 3]))
    torch.testing.assert_close(anchor_N, torch.tensor([-2.0, -1.5, -1.25]))
    assert not anchor_N.requires_grad


def test_weights_carry_no_gradient_and_extremes_stay_finite():
    theta_N = torch.tensor([0.0, -500.0], requires_grad=True)
    mu_N = torch.tensor([-500.0, 0.0])
    corrected = correct(
        theta_N,
        mu_N,
        theta_N.detach(),
        torch.zeros(2, dtype=torch.int64),
        kind="decoupled",
        level="token",
        w_max=2.0,
    )
    assert not corrected.weight_N.requires_grad
    ppo = correct(theta_N, mu_N, mu_N, mu_N.long() * 0, kind="ppo", level="token", w_max=2.0)
    objective_N = clipped_objective(
        ppo.ratio_N, torch.tensor([-1.0, -1.0]), clip_low=0.2, clip_high=0.2, dual_clip=3.0
    ).objective_N
    assert torch.isfinite(gradient(objective_N, theta_N)).all()


def test_trajectory_sums_reach_every_token():
    sums_N = trajectory_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0]))
    assert sums_N.tolist() == [5, 2, 5]


def test_only_recomputed_anchors_that_are_read_cost_a_forward_pass():
    assert needs_anchor_pass("decoupled", "recompute") and needs_anchor_pass("none", "recompute")
    assert not needs_anchor_pass("decoupled", "interpolate")
    assert not needs_anchor_pass("ppo", "recompute")


def test_log_rho_is_constant_and_bounded():
    theta_N = torch.tensor([-1.0, 0.0], requires_grad=True)
    found = log_rho(theta_N, torch.tensor([-1.5, -500.0]))
    assert found.tolist() == [0.5, 20.0] and not found.requires_grad


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_the_weight_of_a_guided_token_is_what_its_kind_says(seed):
    """algorithms §2: stale w = exp(anchor_e - mu), anchor w = 1, behaviour w = exp(anchor - mu)."""
    rng = np.random.default_rng(seed)
    mu, anchor, anchor_e, theta = -rng.exponential(1, (4, 20))
    expected = {
        "stale": np.exp(anchor_e - mu),
        "anchor": np.ones(20),
        "behaviour": np.exp(anchor - mu),
    }
    for kind, w in expected.items():
        old = torch.from_numpy(guided_old(kind, mu, anchor, anchor_e))
        theta_N, anchor_N = torch.from_numpy(theta), torch.from_numpy(anchor)
        options = {"trajectory_N": torch.zeros(20, dtype=torch.int64), "level": "token"}
        found = correct(theta_N, old, anchor_N, kind="decoupled", w_max=math.inf, **options)
        np.testing.assert_allclose(found.weight_N.numpy(), w)
        np.testing.assert_allclose(found.ratio_N.numpy(), np.exp(theta - anchor))
        # ppo bounds q = r w: the lag is in its ratio, the removed context is not under `stale`
        q = correct(theta_N, old, anchor_N, kind="ppo", w_max=math.inf, **options).ratio_N
        np.testing.assert_allclose(q.numpy(), np.exp(theta - anchor) * w)
        ignored = correct(theta_N, old, anchor_N, kind="none", w_max=math.inf, **options)
        assert (ignored.weight_N == 1).all()


def test_removing_the_context_of_a_good_token_holds_it_back_only_as_behaviour():
    """0.9 with experience, 0.09 without it, sampled by the anchor itself: w = 0.1 or 1."""
    mu = anchor_e = np.log(np.array([0.9]))
    anchor = np.log(np.array([0.09]))
    w = {
        kind: float(np.exp(anchor - guided_old(kind, mu, anchor, anchor_e))[0])
        for kind in ("stale", "anchor", "behaviour")
    }
    assert w == pytest.approx({"stale": 1.0, "anchor": 1.0, "behaviour": 0.1})
