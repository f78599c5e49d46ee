"""Loss of supervised stages: next tokens of demonstrations. Pure."""

import torch

from learner.data.batch import MicroBatch, Minibatch
from learner.loss.accounting import Accounting


def sft_loss(theta_N: torch.Tensor, *, tokens: int) -> torch.Tensor:
    """Return -Σ theta / tokens over ACTION tokens: the token mean of the whole optimizer update.

    theta_N: log-probs of a micro-batch's ACTION tokens; `tokens`: their number in the update.
    """
    return -theta_N.sum() / tokens


def supervised_loss(
    theta_N: torch.Tensor,
    entropy_N: torch.Tensor,
    micro: MicroBatch,
    minibatch: Minibatch,
    accounting: Accounting,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a micro-batch and its terms; nothing is measured."""
    value = sft_loss(theta_N, tokens=minibatch.tokens)
    entropy = (1 / minibatch.tokens) * entropy_N.detach().sum()
    return value, {"loss/policy": value.detach(), "loss/entropy": entropy}
