"""Matrix products in bfloat16 on a CPU, forward and backward.

Processors with instructions for bfloat16 multiply it several times as fast as float32. A
`ShortLinear` rounds its input and its weight to bfloat16, in whichever pass; the sums of a product
are float32, its result is rounded and is float32 again. Engine and learner round at the same
places, so their log-probs agree better than either agrees with float32.

Shapes: `N` rows, `I` inputs, `O` outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SHORT = torch.bfloat16
ROUNDED = "rounded"  # attribute of a weight: its version, and what it is rounded to


class ShortLinear(nn.Linear):
    """Linear map with a float32 weight, whose products are in bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        product = ShortProduct.apply(input, self.weight, rounded(self.weight), self.bias)
        assert isinstance(product, Tensor)
        return product


def shorten(module: nn.Module) -> None:
    """Make every plain linear of a module a `ShortLinear`, in place."""
    for one in module.modules():
        if type(one) is nn.Linear:
            one.__class__ = ShortLinear


def is_short(module: nn.Module) -> bool:
    """True if a module has a linear whose products are in bfloat16."""
    return any(isinstance(one, ShortLinear) for one in module.modules())


def rounded(weight: Tensor, made: Callable[[], Tensor] | None = None, *others: Tensor) -> Tensor:
    """Return a weight in bfloat16, or what is made of it and others; it is kept until they change.

    torch counts changes in place, except those by its fused optimizers: see `forget`.
    """
    versions = [one._version for one in (weight, *others)]
    held = getattr(weight, ROUNDED, None)
    if held is None or held[0] != versions:
        held = versions, (weight.detach() if made is None else made()).to(SHORT)
        setattr(weight, ROUNDED, held)
    return held[1]


def forget(weight: Tensor) -> None:
    """Drop what a weight was rounded to, as it has changed."""
    if hasattr(weight, ROUNDED):
        delattr(weight, ROUNDED)


class ShortProduct(torch.autograd.Function):
    """Linear map of rows [..., I] by a rounded weight, whose gradient goes to the weight itself."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, rounded_OI: Tensor, bias_O: Tensor | None
    ) -> Tensor:
        short = x.to(SHORT)
        ctx.save_for_backward(short, rounded_OI)
        product = F.linear(short, rounded_OI).float()
        return product if bias_O is None else product.add_(bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, rounded_OI = ctx.saved_tensors
        for_x, for_weight, _, for_bias = ctx.needs_input_grad
        short = gradients[0].to(SHORT)
        rows_NO, rows_NI = short.flatten(0, -2), x.flatten(0, -2)
        return (
            (short @ rounded_OI).float() if for_x else None,
            (rows_NO.T @ rows_NI).float() if for_weight else None,
            None,
            gradients[0].flatten(0, -2).sum(0) if for_bias else None,
        )
