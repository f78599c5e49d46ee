"""Weights of one version as one run of bytes, staged by every channel before it publishes.

Each tensor begins at a multiple of 64; its entry gives dtype, shape and offset.
"""

import math
from typing import Any

import torch
from torch import Tensor

from evolver_async.schema import WeightId

ALIGN = 64
DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float32", "bfloat16", "float16", "float64"),
        *("int64", "int32", "int8", "uint8", "bool"),
    )
}


class WeightSnapshot:
    """A staging buffer: the manifest and the bytes of one version, reused for the next."""

    def __init__(self, device: str = "cpu") -> None:
        self.bytes_N = torch.empty(0, dtype=torch.uint8, device=device)
        self.weights = WeightId(lineage=0, step=0)
        self.tensors: dict[str, dict[str, Any]] = {}

    def stage(self, weights: WeightId, tensors: dict[str, Tensor]) -> None:
        """Copy `tensors`, from whatever device, into the buffer."""
        self.weights, self.tensors, offset = weights, {}, 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                raise ValueError(f"{name}: dtype {dtype} cannot be published")
            self.tensors[name] = {"dtype": dtype, "shape": list(tensor.shape), "offset": offset}
            offset = aligned(offset + tensor.nbytes)
        if self.bytes_N.numel() != offset:
            self.bytes_N = torch.zeros(offset, dtype=torch.uint8, device=self.bytes_N.device)
        for name, tensor in tensors.items():
            flat_N = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            start = self.tensors[name]["offset"]
            self.bytes_N[start : start + len(flat_N)].copy_(flat_N)


def views(bytes_N: Tensor, entries: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    """Return the tensors of a run of bytes, without a copy."""
    tensors = {}
    for name, entry in entries.items():
        part_N = bytes_N[entry["offset"] : entry["offset"] + nbytes(entry)]
        tensors[name] = part_N.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def nbytes(entry: dict[str, Any]) -> int:
    return math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize


def aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
