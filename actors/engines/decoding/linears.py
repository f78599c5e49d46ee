"""Linear maps of the fused forward: merged if they have a common input.

The products of a `ShortLinear` are in bfloat16, here as in the learner; where the processor has
instructions for it, by oneDNN with weights in its own order.

Shapes: `N` rows, `I` inputs, `O` outputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from evolver_async.model.cpu.products import SHORT, ShortLinear


class Linear:
    """A linear map with the weights of now."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, short: bool = False) -> None:
        """Take a weight and a bias; `short`: in bfloat16."""
        self._bias_O, self._short_OI = bias_O, None
        if not short:
            self._weight_IO = weight_OI.T
            return
        self._short_OI = weight_OI.detach().to(SHORT)
        self._packed = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if self._packed:
            self._short_OI = torch.ops.mkldnn._reorder_linear_weight(self._short_OI, None)

    def __call__(self, x_NI: Tensor, out_NO: Tensor | None = None) -> Tensor:
        """Return the map [N, O], in `out_NO` unless it is in bfloat16."""
        if self._short_OI is not None:
            product = _by_onednn if self._packed else F.linear
            short_NO = product(x_NI.to(SHORT), self._short_OI).float()
            return short_NO if self._bias_O is None else short_NO.add_(self._bias_O)
        if self._bias_O is None:
            return torch.mm(x_NI, self._weight_IO, out=out_NO)
        return torch.addmm(self._bias_O, x_NI, self._weight_IO, out=out_NO)

    def add(self, x_NI: Tensor, to_NO: Tensor) -> None:
        """Add the map of `x_NI`."""
        if self._short_OI is not None:
            to_NO.add_(self(x_NI))
        else:
            to_NO.addmm_(x_NI, self._weight_IO)
            if self._bias_O is not None:
                to_NO.add_(self._bias_O)


class Linears:
    """Linear maps of one input, whose results are joined."""

    def __init__(self, modules: Sequence[Any], copied: bool) -> None:
        """Take the weights of modules as they are now; `copied`: they may be merged."""
        short = all(isinstance(module, ShortLinear) for module in modules)
        weights = [module.weight for module in modules]
        biases = [module.bias for module in modules]
        alike = len({bias is None for bias in biases}) == 1
        if (copied or short) and len(modules) > 1 and alike:
            weights = [torch.cat(weights)]
            biases = [None if biases[0] is None else torch.cat(biases)]
        pairs = zip(weights, biases, strict=True)
        self._linears = [Linear(weight, bias, short) for weight, bias in pairs]

    def __call__(self, x_NI: Tensor, out_NO: Tensor | None = None) -> Tensor:
        """Return the maps [N, O], in `out_NO` unless it is in bfloat16."""
        if len(self._linears) == 1:
            return self._linears[0](x_NI, out_NO)
        return torch.cat([linear(x_NI) for linear in self._linears], 1, out=out_NO)


def _by_onednn(x_NI: Tensor, packed_OI: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_NI, packed_OI, None, "none", [], "")
