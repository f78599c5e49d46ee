"""Matrix products of large float32 matrices on a CPU by oneDNN, forward and backward.

torch multiplies them by MKL, whose kernels for AMD processors leave half of their width unused.
oneDNN's take all of it on every processor, and are as fast as MKL's where that does. The way to
them is longer, so small products stay where they are.

Shapes: `N` rows, `I` inputs, `O` outputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

MIN_PRODUCTS = 1 << 22  # of numbers, from which the longer way pays


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
