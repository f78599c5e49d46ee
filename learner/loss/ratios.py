"""Importance ratios of tokens and trajectories, and the log-probs that they start from. Pure."""

import torch

from evolver_async.schema import Array

LOG_RATIO_BOUND = 20.0  # e^20 is far beyond every clip, and its square still fits float32


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


def log_rho(theta_N: torch.Tensor, mu_N: torch.Tensor) -> torch.Tensor:
    """Return theta - mu, constant and bounded, for estimates of KL(mu || theta)."""
    return (theta_N - mu_N).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def trajectory_totals(x_N: torch.Tensor, trajectory_N: torch.Tensor) -> torch.Tensor:
    """Return for every trajectory the sum of x over all its tokens."""
    sums_P = torch.zeros(int(trajectory_N.max()) + 1, dtype=x_N.dtype, device=x_N.device)
    return sums_P.index_add(0, trajectory_N, x_N)


def trajectory_sum(x_N: torch.Tensor, trajectory_N: torch.Tensor) -> torch.Tensor:
    """Return at every token the sum of x over all tokens of its trajectory."""
    return trajectory_totals(x_N, trajectory_N)[trajectory_N]


def trajectory_mean(x_N: torch.Tensor, trajectory_N: torch.Tensor) -> torch.Tensor:
    """Return at every token the mean of x over all tokens of its trajectory."""
    return trajectory_sum(x_N, trajectory_N) / trajectory_sum(torch.ones_like(x_N), trajectory_N)
