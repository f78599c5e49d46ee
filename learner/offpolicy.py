"""Off-policy corrections: how stale tokens are weighted and which ratio the clipped loss bounds.

Pure functions of per-token log-probs; formulas and letters: algorithms §2. All vectors are over the
N ACTION tokens of whole trajectories, so trajectory-level weights see all their tokens. Every kind
yields the same two things, so that the loss needs not know which one it was. What the data is
corrected from is `old`: mu, but for tokens whose context lost its experience (`guided_old`).
"""

from dataclasses import dataclass

import torch

from evolver_async.schema import Array

LOG_RATIO_BOUND = 20.0  # e^20 is far beyond every clip, and its square still fits float32


@dataclass(frozen=True)
class Corrected:
    """What a correction hands to the loss, and what is worth logging about it.

    ratio_N: x of the clipped objective L(x), differentiable. weight_N: its factor, constant.
    w_N = exp(anchor - old), r_N = exp(theta - anchor): constants, per token and untruncated
    whatever the kind does with them (`ppo` has no anchor: w = q, r = q).
    """

    ratio_N: torch.Tensor
    weight_N: torch.Tensor
    w_N: torch.Tensor
    r_N: torch.Tensor


def bounded_exp(log_N: torch.Tensor) -> torch.Tensor:
    """exp, finite: an infinite ratio would turn the zero gradient of a clipped token into NaN."""
    return log_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def needs_anchor_pass(kind: str, anchor: str) -> bool:
    """Whether the log-probs of the step's starting weights must be computed by a forward pass."""
    return kind != "ppo" and anchor == "recompute"


def guided_old(kind: str, mu_N: Array, anchor_N: Array, anchor_e_N: Array | None) -> Array:
    """`old` of tokens that were sampled with experience in a context that has it no more.

    anchor_e_N: the anchor's log-probs in the context that was sampled; only `stale` reads them.
    `stale`: anchor - (anchor_e - mu), so that w = exp(anchor_e - mu) is the version lag alone.
    `anchor`: the anchor, so w = 1. `behaviour`: mu, so w holds lag and removed context.
    """
    if kind == "behaviour":
        return mu_N
    if kind == "anchor":
        return anchor_N
    assert kind == "stale" and anchor_e_N is not None, kind
    return anchor_N - (anchor_e_N - mu_N)


def interpolated_anchor(
    theta_N: torch.Tensor, mu_N: torch.Tensor, lag_N: torch.Tensor
) -> torch.Tensor:
    """mu + alpha sg(theta - mu), alpha = lag / (lag + 1): mu itself at lag 0."""
    alpha_N = lag_N / (lag_N + 1)
    return mu_N + alpha_N * (theta_N.detach() - mu_N)


def correct(
    theta_N: torch.Tensor,
    old_N: torch.Tensor,
    anchor_N: torch.Tensor,
    trajectory_N: torch.Tensor,
    *,
    kind: str,
    level: str,
    w_max: float,
) -> Corrected:
    """The ratio and the weight of every token under the correction `kind`.

    `none`: L(r), `old_N` ignored. `ppo`: L(q), `anchor_N` ignored. `decoupled`: min(w, w_max) L(r),
    at `level: trajectory` with the product W of w over the trajectory's tokens instead of w.
    theta_N carries the gradient; trajectory_N int64[N] says which tokens belong together.
    """
    one_N = torch.ones_like(old_N)
    if kind == "ppo":
        ratio_N, weight_N = bounded_exp(theta_N - old_N), one_N
        w_N = ratio_N.detach()
    else:
        ratio_N = bounded_exp(theta_N - anchor_N)
        w_N = bounded_exp(anchor_N - old_N)
        if kind == "none":
            weight_N = one_N
        elif level == "token":
            weight_N = w_N.clamp(max=w_max)
        else:
            assert kind == "decoupled" and level == "trajectory", (kind, level)
            log_W_N = trajectory_sum(anchor_N - old_N, trajectory_N)
            weight_N = bounded_exp(log_W_N).clamp(max=w_max)
    return Corrected(ratio_N, weight_N, w_N, r_N=ratio_N.detach())


def log_rho(theta_N: torch.Tensor, mu_N: torch.Tensor) -> torch.Tensor:
    """theta - mu, constant and bounded: what KL(mu || theta) is made of."""
    return (theta_N - mu_N).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def trajectory_sum(x_N: torch.Tensor, trajectory_N: torch.Tensor) -> torch.Tensor:
    """At every token, the sum of x over all tokens of its trajectory."""
    sums_P = torch.zeros(int(trajectory_N.max()) + 1, dtype=x_N.dtype, device=x_N.device)
    return sums_P.index_add(0, trajectory_N, x_N)[trajectory_N]
