"""Matrix products on a CPU, forward and backward: large ones by oneDNN, some in bfloat16.

torch multiplies float32 matrices by MKL, whose kernels for AMD processors leave half of their width
unused. oneDNN's take all of it on every processor, and are as fast as MKL's where that does. The
way to them is longer, so small products stay where they are.

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

MIN_PRODUCTS = 1 << 22  # of numbers, from which the longer way pays
SHORT = torch.bfloat16
ROUNDED = "rounded"  # attribute of a weight: its version, and what it is rounded to


def least_rows(weight_OI: Tensor) -> float:
    """Return the number of rows from which `by_onednn` pays; infinity if it cannot be used."""
    if (
        weight_OI.device.type != "cpu"
        or weight_OI.dtype != torch.float32
        or not torch.backends.mkl.is_available()
        or not torch.backends.mkldnn.is_available()
        or torch.is_autocast_enabled("cpu")
    ):
        return torch.inf
    return MIN_PRODUCTS / weight_OI.numel()


def by_onednn(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute a linear map without a gradient; the weight may be in oneDNN's own order."""
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute a linear map [N, O]. Differentiable, once."""
    if len(x_NI) < least_rows(weight_OI):
        return F.linear(x_NI, weight_OI, bias_O)
    product = LinearProduct.apply(x_NI, weight_OI, bias_O)
    assert isinstance(product, Tensor)
    return product


class LinearProduct(torch.autograd.Function):
    """Linear map whose three products oneDNN computes."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return by_onednn(x_NI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        (grad_NO,) = gradients
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            by_onednn(grad_NO, weight_OI.T) if for_x else None,
            _of_weight(x_NI, grad_NO) if for_weight else None,
            grad_NO.sum(0) if for_bias else None,
        )


def _of_weight(x_NI: Tensor, grad_NO: Tensor) -> Tensor:
    """Return the gradient of the weight; the narrower matrix is the one that is copied."""
    if x_NI.shape[1] < grad_NO.shape[1]:
        return by_onednn(x_NI.T.contiguous(), grad_NO.T).T
    return by_onednn(grad_NO.T.contiguous(), x_NI.T)


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
