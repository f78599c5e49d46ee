"""Weights of one version as one run of bytes: the place of every tensor in it.

Each tensor begins at a multiple of 64; its entry gives dtype, shape and offset. The bytes between
two tensors are zero.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGN = 64
DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float32", "bfloat16", "float16", "float64"),
        *("int64", "int32", "int8", "uint8", "bool"),
    )
}


@dataclass(frozen=True)
class Layout:
    """Entries by tensor name, and the number of bytes of them all."""

    entries: dict[str, dict[str, Any]]
    size: int

    @staticmethod
    def of(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> "Layout":
        """Lay tensors out in their order. ValueError for a type that cannot be published.

        Of float32 w [3, 4] and b [4]: {"w": {"dtype": "float32", "shape": [3, 4], "offset": 0},
        "b": {"dtype": "float32", "shape": [4], "offset": 64}} and a size of 128.
        """
        entries, offset = {}, 0
        for name, dtype, shape in tensors:
            short = str(dtype).removeprefix("torch.")
            if short not in DTYPES:
                raise ValueError(f"{name}: dtype {short} cannot be published")
            entries[name] = {"dtype": short, "shape": list(shape), "offset": offset}
            offset = aligned(offset + nbytes(entries[name]))
        return Layout(entries, offset)

    def followed_by(self, other: "Layout") -> "Layout":
        """Lay the tensors of another layout behind these."""
        moved = {
            name: {**entry, "offset": self.size + entry["offset"]}
            for name, entry in other.entries.items()
        }
        return Layout({**self.entries, **moved}, self.size + other.size)


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
