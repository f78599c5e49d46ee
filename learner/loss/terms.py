"""Terms of losses: clipped objective, KL to a reference, entropy, values, next tokens. Pure.

All vectors are over the N ACTION tokens of a micro-batch. The aggregation is a weight per token
made from denominators of the whole optimizer update, so the losses of micro-batches simply add up:
not a mean of means. Formulas: docs/algorithms.md, Losses.
"""

from dataclasses import dataclass

import torch

from learner.loss.ratios import LOG_RATIO_BOUND

K3_LIMIT = 10.0


@dataclass(frozen=True)
class Clipped:
    """Objective L(x) of every token, and the tokens that a bound holds, which have no gradient.

    low_N: A < 0 and x below the lower bound. high_N: A > 0 and x above the upper bound, or A < 0
    and x above the dual clip.
    """

    objective_N: torch.Tensor
    low_N: torch.Tensor
    high_N: torch.Tensor


def clipped_objective(
    ratio_N: torch.Tensor,
    advantage_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float | torch.Tensor,
    dual_clip: float,
) -> Clipped:
    """Return min(x A, clip(x, 1 - clip_low, 1 + clip_high) A), at least dual_clip A where A < 0.

    `clip_high` may differ by token (float32[N]). The cases are written out because each gives one
    constant bound: A > 0 only the upper one, A < 0 the lower one and the dual clip.
    """
    x_N = ratio_N.detach()
    good_N, bad_N = advantage_N > 0, advantage_N < 0
    low_N = bad_N & (x_N < 1 - clip_low)
    high_N = good_N & (x_N > 1 + clip_high)
    dual_N = bad_N & (x_N > dual_clip)
    held_N = torch.where(high_N, 1 + clip_high, ratio_N)
    held_N = torch.where(low_N, 1 - clip_low, held_N)
    held_N = torch.where(dual_N, dual_clip, held_N)
    return Clipped(held_N * advantage_N, low_N, high_N | dual_N)


def unclipped_objective(x_N: torch.Tensor, advantage_N: torch.Tensor) -> Clipped:
    """Return x A without any bound."""
    nowhere_N = torch.zeros_like(advantage_N, dtype=torch.bool)
    return Clipped(x_N * advantage_N, nowhere_N, nowhere_N)


@dataclass(frozen=True)
class Boosted:
    """Stripped tokens with A > 0, which have a larger upper bound than clip_high.

    tokens_N: all of these; freed_N: x lies between the two bounds, so the token has a gradient
    because of the boost; bound_N: x is above the larger bound as well.
    """

    tokens_N: torch.Tensor
    freed_N: torch.Tensor
    bound_N: torch.Tensor


def boosted(
    ratio_N: torch.Tensor,
    advantage_N: torch.Tensor,
    stripped_N: torch.Tensor,
    *,
    clip_high: float,
    boost: float,
) -> Boosted:
    """Compare `boost` with clip_high on the stripped tokens; for A < 0 neither binds."""
    x_N = ratio_N.detach()
    tokens_N = stripped_N & (advantage_N > 0)
    bound_N = tokens_N & (x_N > 1 + boost)
    return Boosted(tokens_N, tokens_N & (x_N > 1 + clip_high) & ~bound_N, bound_N)


def kl_estimate(kind: str, theta_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Estimate KL(theta || reference) per token, from tokens drawn by theta.

    With d = clamp(ref - theta, -20, 20): k1 = -d, k2 = d²/2, k3 = min(e^d - 1 - d, 10), as verl's
    `low_var_kl` (core_algos.py) clamps d to ±20 and its estimate to ±10. A clamped token has no
    gradient; every other gradient moves theta towards the reference.
    """
    d_N = (reference_N - theta_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if kind == "k1":
        return -d_N
    if kind == "k2":
        return d_N**2 / 2
    assert kind == "k3", kind
    return (d_N.exp() - 1 - d_N).clamp(max=K3_LIMIT)


def token_scale(
    aggregation: str, length_N: torch.Tensor, *, tokens: int, trajectories: int, norm_tokens: int
) -> torch.Tensor:
    """Return the weight of every token in agg(x) = Σ scale · x.

    `token_mean`: 1/tokens. `sequence_mean`: the mean over trajectories of the mean over each one's
    length_N ACTION tokens (all its sequences). `sequence_sum_norm`: 1/(trajectories · norm_tokens).
    `tokens` and `trajectories` are those of the whole optimizer update. Tokens of two trajectories
    with 2 and 6 ACTION tokens weigh 1/8 each by `token_mean`, 1/4 and 1/12 by `sequence_mean`.
    """
    if aggregation == "token_mean":
        return torch.full(length_N.shape, 1 / tokens, device=length_N.device)
    if aggregation == "sequence_mean":
        return 1 / (trajectories * length_N.float())
    assert aggregation == "sequence_sum_norm", aggregation
    return torch.full(length_N.shape, 1 / (trajectories * norm_tokens), device=length_N.device)


def policy_loss(
    objective_N: torch.Tensor,
    scale_N: torch.Tensor,
    *,
    kl_N: torch.Tensor | None,
    kl_coef: float,
    entropy_N: torch.Tensor,
    entropy_coef: float,
    tokens: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return -agg(objective) + kl_coef agg(kl) - entropy_coef agg(entropy), and its terms.

    `kl_N` None: no KL in the loss. The terms (detached; `loss/policy`, `loss/entropy`, `loss/kl`)
    add up over the micro-batches of an update just as the loss does. `loss/entropy` is in nats per
    token, of all `tokens` of the update, whatever the aggregation.
    """
    policy = -(scale_N * objective_N).sum()
    loss = policy
    terms = {"loss/policy": policy.detach(), "loss/entropy": entropy_N.detach().sum() / tokens}
    if entropy_coef:
        loss = loss - entropy_coef * (scale_N * entropy_N).sum()
    if kl_N is not None:
        kl = (scale_N * kl_N).sum()
        loss = loss + kl_coef * kl
        terms["loss/kl"] = kl.detach()
    return loss, terms


def value_loss(
    value_N: torch.Tensor,
    old_N: torch.Tensor,
    return_N: torch.Tensor,
    *,
    clip: float,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ½ max((V - G)², (V' - G)²), V' = old + clamp(V - old, ±clip), as a mean over `tokens`.

    Also bool[N]: True where the clip holds V, so that no gradient reaches it.
    """
    moved_N = value_N - old_N
    held_N = old_N + moved_N.clamp(-clip, clip)
    free, bound = (value_N - return_N) ** 2, (held_N - return_N) ** 2
    binds_N = (bound > free) & (moved_N.abs() > clip)
    return torch.maximum(free, bound).sum() / (2 * tokens), binds_N


def sft_loss(theta_N: torch.Tensor, *, tokens: int) -> torch.Tensor:
    """Return -Σ theta / tokens over ACTION tokens: the token mean of the whole optimizer update.

    theta_N: log-probs of a micro-batch's ACTION tokens; `tokens`: their number in the update.
    """
    return -theta_N.sum() / tokens
