"""Linear maps of the fused forward: merged if they have a common input, by oneDNN where it pays.

oneDNN reads weights that were packed in its own order in half of the time, which also makes small
batches faster (`evolver_async.model.products`). Among calls of MKL a single one costs 20 to 30 us
more, as its code is not in the cache.

The products of a `ShortLinear` are in bfloat16, here as in the learner.

Shapes: `N` rows, `I` inputs, `O` outputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from evolver_async.model.products import SHORT, ShortLinear, by_onednn, least_rows

MIN_PACKED = 3 << 16  # numbers of a weight; below, packing does not pay for the longer way


class Linear:
    """A linear map with the weights of now."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, copied: bool, short: bool = False
    ) -> None:
        """Take a weight and a bias; `copied`: a packed copy may be made; `short`: in bfloat16."""
        self._bias_O, self._short_OI = bias_O, None
        if short:
            self._short_OI = weight_OI.detach().to(SHORT)
            self._packed = torch.ops.mkldnn._is_mkldnn_bf16_supported()
            if self._packed:
                self._short_OI = torch.ops.mkldnn._reorder_linear_weight(self._short_OI, None)
            return
        self._weight_OI, self._weight_IO = weight_OI, weight_OI.T
        self._least_rows = least_rows(weight_OI)
        if copied and self._least_rows < torch.inf and weight_OI.numel() >= MIN_PACKED:
            packed_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), None)
            self._weight_OI = self._weight_IO = packed_OI  # the other order is not kept
            self._least_rows = 0

    def __call__(self, x_NI: Tensor, out_NO: Tensor | None = None) -> Tensor:
        """Return the map [N, O], in `out_NO` unless oneDNN makes a tensor of its own."""
        if self._short_OI is not None:
            product = by_onednn if self._packed else F.linear
            short_NO = product(x_NI.to(SHORT), self._short_OI).float()
            return short_NO if self._bias_O is None else short_NO.add_(self._bias_O)
        if len(x_NI) >= self._least_rows:
            return by_onednn(x_NI, self._weight_OI, self._bias_O)
        if self._bias_O is None:
            return torch.mm(x_NI, self._weight_IO, out=out_NO)
        return torch.addmm(self._bias_O, x_NI, self._weight_IO, out=out_NO)

    def add(self, x_NI: Tensor, to_NO: Tensor) -> None:
        """Add the map of `x_NI`."""
        if self._short_OI is not None:
            to_NO.add_(self(x_NI))
        elif len(x_NI) >= self._least_rows:
            to_NO.add_(by_onednn(x_NI, self._weight_OI, self._bias_O))
        else:
            to_NO.addmm_(x_NI, self._weight_IO)
            if self._bias_O is not None:
                to_NO.add_(self._bias_O)


class Linears:
    """Linear maps of one input, whose results are joined."""

    def __init__(self, modules: Sequence[Any], copied: bool) -> None:
        """Take the weights of modules as they are now; `copied`: they may be merged and packed."""
        short = all(isinstance(module, ShortLinear) for module in modules)
        weights = [module.weight for module in modules]
        biases = [module.bias for module in modules]
        alike = len({bias is None for bias in biases}) == 1
        if (copied or short) and len(modules) > 1 and alike:
            weights = [torch.cat(weights)]
            biases = [None if biases[0] is None else torch.cat(biases)]
        pairs = zip(weights, biases, strict=True)
        self._linears = [Linear(weight, bias, copied, short) for weight, bias in pairs]

    def __call__(self, x_NI: Tensor, out_NO: Tensor | None = None) -> Tensor:
        """Return the maps [N, O], in `out_NO` unless oneDNN makes a tensor of its own."""
        if len(self._linears) == 1:
            return self._linears[0](x_NI, out_NO)
        return torch.cat([linear(x_NI) for linear in self._linears], 1, out=out_NO)
