"""The corrections against loops in the notation of the algorithms page, and identities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evolver_async.metrics import LagAccounting
from learner.loss import clipped_objective
from learner.offpolicy import (
    account,
    correct,
    interpolated_anchor,
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
        "mu_N": mu_N,
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
        assert float(corrected.log_rho_N[t]) == pytest.approx(theta[t] - mu[t])


def test_without_lag_all_corrections_are_the_same():
    data, A_N = draw(0), advantage(0)
    data["anchor_N"] = data["mu_N"]
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
    data["anchor_N"] = data["mu_N"] = data["theta_N"].detach()
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
    q_N = (data["theta_N"] - data["mu_N"]).detach().exp()
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


def test_accounting_gets_what_the_correction_found():
    data, A_N = draw(5), advantage(5)
    corrected = correct(**data, kind="decoupled", level="token", w_max=2.0)
    clipped = clipped_objective(corrected.ratio_N, A_N, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    accounting = LagAccounting()
    for half in (slice(0, 20), slice(20, 40)):
        account(
            accounting,
            type(corrected)(**{name: value[half] for name, value in vars(corrected).items()}),
            torch.ones(20, dtype=torch.int64),
            clipped.low_N[half],
            clipped.high_N[half],
        )
    found = accounting.metrics()
    w = corrected.w_N.numpy()
    assert found["offpolicy/ess"] == pytest.approx(w.sum() ** 2 / (40 * (w**2).sum()))
    rho = np.exp((data["theta_N"] - data["mu_N"]).detach().numpy())
    assert found["lag_1/kl"] == pytest.approx((rho - 1 - np.log(rho)).mean())
    stopped = (clipped.low_N | clipped.high_N).double().mean()
    assert found["offpolicy/masked"] == pytest.approx(float(stopped))
