"""Projection of hidden states to log-probs, for one chunk of positions.

A head in a short type sums the gradients of many chunks in float32.

Shapes: `N` positions, `D` hidden size, `V` vocabulary, `K` likeliest tokens, `M` masks, `W` bytes
of one mask (ceil(V / 8)).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# In place of a masked logit. Not -inf: an entropy would add 0 · inf.
MASKED = -1e30


class TokenMasks(NamedTuple):
    """Masks of positions whose tokens obey a grammar.

    mask_N int64: the position's row of allowed_MW, -1 if all tokens are allowed. allowed_MW uint8:
    one bit per token, the lowest first.
    """

    mask_N: Tensor
    allowed_MW: Tensor

    def of(self, mask_N: Tensor) -> "TokenMasks":
        """Return the masks of other positions."""
        return TokenMasks(mask_N, self.allowed_MW)


class Float32Gradient(torch.autograd.Function):
    """Stand-in for weights of a short type, whose chunks' gradients it adds in float32."""

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor) -> Tensor:
        """Return a tensor of the weights' shape without memory of its own; it is never read."""
        ctx.dtype = weight_VD.dtype
        return torch.zeros((), dtype=torch.float32, device=weight_VD.device).expand_as(weight_VD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].to(ctx.dtype)


class ChunkLinear(torch.autograd.Function):
    """Projection whose gradient of the weights goes to their `Float32Gradient` instead."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, _: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD)
        return F.linear(hidden_ND, weight_VD, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor, Tensor | None]:
        hidden_ND, weight_VD = ctx.saved_tensors
        (gradient_NV,) = gradients
        wide_VD = (gradient_NV.T @ hidden_ND).float()
        bias = gradient_NV.sum(0) if ctx.needs_input_grad[3] else None
        return gradient_NV @ weight_VD, None, wide_VD, bias


def projection_of(head: nn.Module, several: bool) -> Callable[[Tensor], Tensor]:
    """Make the projection of a chunk; the gradients of `several` chunks are rounded only once."""
    if not several:
        return head
    assert isinstance(head, nn.Linear)
    weight_VD, bias = head.weight, head.bias
    if weight_VD.element_size() >= torch.float32.itemsize or not weight_VD.requires_grad:
        return head
    wide_VD = Float32Gradient.apply(weight_VD)
    return lambda hidden_ND: ChunkLinear.apply(hidden_ND, weight_VD.detach(), wide_VD, bias)


def masked(logits_NV: Tensor, mask_N: Tensor, allowed_MW: Tensor) -> Tensor:
    """Replace the logits of tokens that `TokenMasks` exclude by `MASKED`. Differentiable."""
    ruled_R = (mask_N >= 0).nonzero().squeeze(-1)
    if not len(ruled_R):
        return logits_NV
    allowed_RW = allowed_MW[mask_N[ruled_R]]
    bit_8 = torch.arange(8, dtype=torch.uint8, device=allowed_RW.device)
    allowed_RV = (allowed_RW[..., None] >> bit_8 & 1).flatten(1)[:, : logits_NV.shape[1]].bool()
    return logits_NV.index_put((ruled_R,), logits_NV[ruled_R].where(allowed_RV, MASKED))


def project(
    head: Callable[[Tensor], Tensor],
    temperature: float,
    with_entropy: bool,
    entropy_top_k: int,
    hidden_ND: Tensor,
    targets_N: Tensor,
    masks: TokenMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probs of a chunk of targets, and their entropies or 0."""
    logits_NV = head(hidden_ND).float()
    if temperature not in (0.0, 1.0):
        logits_NV = logits_NV / temperature
    if masks is not None:
        logits_NV = masked(logits_NV, *masks)
    logps_NV = logits_NV.log_softmax(-1)
    picked_N = logps_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    if not with_entropy:
        return picked_N, torch.zeros_like(picked_N)
    entropy_N = -(logps_NV.exp() * logps_NV).sum(-1)
    if entropy_top_k:
        size = min(entropy_top_k, logps_NV.shape[-1])
        largest_NK = logps_NV.topk(size).values.log_softmax(-1)
        top_N = -(largest_NK.exp() * largest_NK).sum(-1)
        entropy_N = top_N + (entropy_N - top_N).detach()
    return picked_N, entropy_N
