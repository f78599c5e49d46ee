"""Linear maps of the fused forward: merged if they have a common input, by oneDNN where it pays.

oneDNN reads weights that were packed in its own order in half of the time, which also makes small
batches faster (`evolver_async.model.products`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from evolver_async.model.products import by_onednn, least_rows

MIN_PACKED = 3 << 16  # numbers of a weight; below, packing does not pay for the longer way


class Linear:
    """A linear map with the weights of now."""

    def __init__(self, weight: Tensor, bias: Tensor | None, copied: bool) -> None:
        """Take a weight and a bias; `copied`: a packed copy may be made."""
        self._weight, self._bias = weight, bias
        self._least_rows = least_rows(weight)
        if copied and self._least_rows < torch.inf and weight.numel() >= MIN_PACKED:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
            self._least_rows = 0

    def __call__(self, x_NM: Tensor) -> Tensor:
        if len(x_NM) < self._least_rows:
            return F.linear(x_NM, self._weight, self._bias)
        return by_onednn(x_NM, self._weight, self._bias)


class Linears:
    """Linear maps of one input, whose results are joined."""

    def __init__(self, modules: Sequence[Any], copied: bool) -> None:
        """Take the weights of modules as they are now; `copied`: they may be merged and packed."""
        weights = [module.weight for module in modules]
        biases = [module.bias for module in modules]
        alike = len({bias is None for bias in biases}) == 1
        if copied and len(modules) > 1 and alike:
            weights = [torch.cat(weights)]
            biases = [None if biases[0] is None else torch.cat(biases)]
        pairs = zip(weights, biases, strict=True)
        self._linears = [Linear(weight, bias, copied) for weight, bias in pairs]

    def __call__(self, x_NM: Tensor) -> Tensor:
        if len(self._linears) == 1:
            return self._linears[0](x_NM)
        return torch.cat([linear(x_NM) for linear in self._linears], 1)
