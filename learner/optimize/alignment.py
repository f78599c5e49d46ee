"""Control of the alignment of consecutive gradients, after GAC (arXiv 2603.01501).

Stale data makes the gradients of consecutive updates point the same way, where those of fresh data
are nearly orthogonal; correlated updates overshoot. The part of a gradient along the one before is
reduced until their cosine is at most a bound.
"""

import math
from collections.abc import Mapping

import torch

from learner.ranks.process_group import whole_tensor

PREVIOUS = "previous_grad"  # slot of the optimizer's state, and so of a checkpoint


@torch.no_grad()
def align(
    optimizer: torch.optim.Optimizer, max_cosine: float
) -> tuple[float, dict[torch.Tensor, torch.Tensor]]:
    """Bound the cosine of the gradients and those of the update before; change them in place.

    With g = a p + h, p the unit vector of the gradient before and h orthogonal to it, and a cosine
    above c = `max_cosine`, a becomes c |h| / sqrt(1 - c²). Norms and products are over all weights
    and ranks. Returns the cosine as it was, 0 without a gradient before, and the gradients as they
    were, for `remember`. Gradients that are not finite stay as they are.
    """
    grads = _gradients(optimizer)
    kept = {weight: grad.clone() for weight, grad in grads.items()}
    before = {
        weight: optimizer.state[weight][PREVIOUS]
        for weight in grads
        if PREVIOUS in optimizer.state.get(weight, {})
    }
    if len(before) < len(grads):
        return 0.0, kept
    product = _dot(grads, before)
    norm, norm_before = math.sqrt(_dot(grads, grads)), math.sqrt(_dot(before, before))
    if not (0 < norm < math.inf and 0 < norm_before < math.inf):
        return 0.0, kept
    cosine = product / (norm * norm_before)
    if cosine > max_cosine:
        along = product / norm_before
        across = math.sqrt(max(0.0, norm**2 - along**2))
        wanted = max_cosine * across / math.sqrt(1 - max_cosine**2)
        for weight, grad in grads.items():
            grad.add_(before[weight], alpha=(wanted - along) / norm_before)
    return cosine, kept


def remember(
    optimizer: torch.optim.Optimizer, gradients: Mapping[torch.Tensor, torch.Tensor]
) -> None:
    """Keep the gradients of an update that was applied for the next one."""
    for weight, gradient in gradients.items():
        optimizer.state[weight][PREVIOUS] = gradient


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Drop the gradients of the update before."""
    for state in optimizer.state.values():
        state.pop(PREVIOUS, None)


def _gradients(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, torch.Tensor]:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return {weight: weight.grad for weight in weights if weight.grad is not None}


def _dot(a: Mapping[torch.Tensor, torch.Tensor], b: Mapping[torch.Tensor, torch.Tensor]) -> float:
    return sum(float(whole_tensor((a[weight] * b[weight]).sum())) for weight in a)
