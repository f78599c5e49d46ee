"""Off-policy corrections: how stale tokens are weighted and which ratio the clipped loss bounds.

Pure functions of per-token log-probs; formulas and letters: algorithms §2. All vectors are over the
N ACTION tokens of whole trajectories, so trajectory-level weights see all their tokens. Every kind
yields a ratio and a weight, so that the loss is the same for all. `old`, from which the data is
corrected, is mu, except for tokens whose context lost its experience (`guided_old`).
"""

from dataclasses import dataclass

import torch

from evolver_async.config import CorrectionConfig
from evolver_async.schema import Array

LOG_RATIO_BOUND = 20.0  # e^20 is far beyond every clip, and its square still fits float32
UNANCHORED = ("ppo", "cispo", "topr")  # the kinds that read no anchor


@dataclass(frozen=True)
class Corrected:
    """Ratio and weight of every token for the loss, and constants for the log.

    The objective of a token is weight_N L(x) with the clipped L and x = ratio_N, or, if the kind
    does not clip, weight_N A ratio_N, whose ratio_N is theta. ratio_N is differentiable, weight_N
    constant. w_N = exp(anchor - old), r_N = exp(theta - anchor): constants, per token and
    untruncated whatever the kind does with them (kinds without an anchor: w = r = q).
    """

    ratio_N: torch.Tensor
    weight_N: torch.Tensor
    w_N: torch.Tensor
    r_N: torch.Tensor
    clips: bool


def bounded_exp(log_N: torch.Tensor) -> torch.Tensor:
    """Return exp, bounded: an infinite ratio turns the zero gradient of a clipped token to NaN."""
    return log_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def guided_old(kind: str, mu_N: Array, anchor_N: Array, anchor_e_N: Array | None) -> Array:
    """Return `old` of tokens that were sampled with experience and are trained without it.

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
    """Return mu + alpha sg(theta - mu), alpha = lag / (lag + 1): mu itself at lag 0."""
    alpha_N = lag_N / (lag_N + 1)
    return mu_N + alpha_N * (theta_N.detach() - mu_N)


def correct(
    theta_N: torch.Tensor,
    old_N: torch.Tensor,
    anchor_N: torch.Tensor,
    advantage_N: torch.Tensor,
    trajectory_N: torch.Tensor,
    settings: CorrectionConfig,
) -> Corrected:
    """Return the ratio and the weight of every token under a correction.

    theta_N carries the gradient; trajectory_N int64[N]: the trajectory of each token.
    `anchor_N` is not read by the kinds `UNANCHORED`; `advantage_N` only by `topr`.
    """
    if settings.kind in UNANCHORED:
        return _unanchored(theta_N, old_N, advantage_N, trajectory_N, settings)
    return _anchored(theta_N, old_N, anchor_N, trajectory_N, settings)


def _unanchored(
    theta_N: torch.Tensor,
    old_N: torch.Tensor,
    advantage_N: torch.Tensor,
    trajectory_N: torch.Tensor,
    settings: CorrectionConfig,
) -> Corrected:
    """Apply a kind that reads q = exp(theta - old) alone.

    `ppo`: L(q). `cispo`: sg min(q, 1 + epsilon) A theta. `topr`: A theta where A > 0, else
    sg min(q, 1) A theta, at `level: trajectory` with the product Q of q over the trajectory.
    """
    ratio_N = bounded_exp(theta_N - old_N)
    q_N = ratio_N.detach()
    if settings.kind == "ppo":
        return Corrected(ratio_N, torch.ones_like(q_N), q_N, q_N, clips=True)
    if settings.kind == "cispo":
        weight_N = q_N.clamp(max=1 + settings.epsilon)
    else:
        assert settings.kind == "topr", settings.kind
        whole_N = q_N
        if settings.level == "trajectory":
            whole_N = bounded_exp(trajectory_sum((theta_N - old_N).detach(), trajectory_N))
        weight_N = torch.where(advantage_N > 0, torch.ones_like(q_N), whole_N.clamp(max=1))
    return Corrected(theta_N, weight_N, q_N, q_N, clips=False)


def _anchored(
    theta_N: torch.Tensor,
    old_N: torch.Tensor,
    anchor_N: torch.Tensor,
    trajectory_N: torch.Tensor,
    settings: CorrectionConfig,
) -> Corrected:
    """Apply a kind that reads r = exp(theta - anchor) and w = exp(anchor - old).

    W is the product of w over all n tokens of the trajectory.

    `none`: L(r). `decoupled`: min(w, w_max) L(r), at `level: trajectory` with W for w. `icepop`:
    1[low <= w <= high] w L(r). `geo_mask`: 1[low <= W^(1/n) <= high] L(r). `gspo`:
    min(W^(1/n), w_max) L(s_t), s_t = sg(s) exp(theta - sg theta), s = exp(mean_t(theta - anchor)).
    """
    kind, log_w_N = settings.kind, anchor_N - old_N
    ratio_N, w_N = bounded_exp(theta_N - anchor_N), bounded_exp(log_w_N)
    r_N = ratio_N.detach()
    if kind == "none":
        weight_N = torch.ones_like(w_N)
    elif kind == "decoupled":
        whole_N = w_N
        if settings.level == "trajectory":
            whole_N = bounded_exp(trajectory_sum(log_w_N, trajectory_N))
        weight_N = whole_N.clamp(max=settings.w_max)
    elif kind == "icepop":
        weight_N = w_N * _within(w_N, settings)
    elif kind == "geo_mask":
        weight_N = _within(bounded_exp(trajectory_mean(log_w_N, trajectory_N)), settings)
    else:
        assert kind == "gspo", kind
        weight_N = bounded_exp(trajectory_mean(log_w_N, trajectory_N)).clamp(max=settings.w_max)
        s_N = bounded_exp(trajectory_mean((theta_N - anchor_N).detach(), trajectory_N))
        ratio_N = s_N * (theta_N - theta_N.detach()).exp()
    return Corrected(ratio_N, weight_N, w_N, r_N, clips=True)


def _within(x_N: torch.Tensor, settings: CorrectionConfig) -> torch.Tensor:
    """Return 1 where low <= x <= high, else 0: masked tokens stay in every denominator."""
    return ((x_N >= settings.low) & (x_N <= settings.high)).to(x_N.dtype)


def log_rho(theta_N: torch.Tensor, mu_N: torch.Tensor) -> torch.Tensor:
    """Return theta - mu, constant and bounded, for estimates of KL(mu || theta)."""
    return (theta_N - mu_N).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def trajectory_sum(x_N: torch.Tensor, trajectory_N: torch.Tensor) -> torch.Tensor:
    """Return at every token the sum of x over all tokens of its trajectory."""
    sums_P = torch.zeros(int(trajectory_N.max()) + 1, dtype=x_N.dtype, device=x_N.device)
    return sums_P.index_add(0, trajectory_N, x_N)[trajectory_N]


def trajectory_mean(x_N: torch.Tensor, trajectory_N: torch.Tensor) -> torch.Tensor:
    """Return at every token the mean of x over all tokens of its trajectory."""
    return trajectory_sum(x_N, trajectory_N) / trajectory_sum(torch.ones_like(x_N), trajectory_N)
