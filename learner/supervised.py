"""The loss of the supervised stages: next tokens of demonstrations. Pure."""

import torch


def sft_loss(theta_N: torch.Tensor, *, tokens: int) -> torch.Tensor:
    """-Σ theta / tokens over ACTION tokens: the token mean of the whole optimizer update.

    theta_N: log-probs of a micro-batch's ACTION tokens; `tokens`: how many the update has in all.
    """
    return -theta_N.sum() / tokens
