"""Clipped loss of a critic's values. Pure; formula: docs/algorithms.md, Losses."""

import torch


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
