"""Weights on their way to a publisher: their layout first, then their bytes in parts.

A source need not hold whole tensors: ranks that share a model gather them part by part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from evolver_async.weights.channel.byte_layout import Layout


@dataclass(frozen=True)
class Part:
    """Bytes of a tensor from its byte `start` on, on any device."""

    name: str
    start: int
    bytes_N: Tensor


class WeightSource(Protocol):
    """Weights of one version."""

    @property
    def layout(self) -> Layout: ...

    @property
    def on_host(self) -> bool:
        """True if another thread may ask for the parts: they are views of host memory."""
        ...

    def parts(self) -> Iterator[list[Part]]:
        """Yield all bytes once; a list is valid until the next one is asked for."""
        ...


class WholeTensors:
    """Source of tensors that this process holds."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.layout = Layout.of((name, one.dtype, one.shape) for name, one in tensors.items())
        self.on_host = not any(one.is_cuda for one in tensors.values())

    def parts(self) -> Iterator[list[Part]]:
        split = [name for name, one in self._tensors.items() if not one.is_contiguous()]
        yield [whole_part(name, one) for name, one in self._tensors.items() if name not in split]
        for name in split:  # one at a time: each is copied
            yield [whole_part(name, self._tensors[name].contiguous())]


def whole_part(name: str, tensor: Tensor) -> Part:
    """Return all bytes of a contiguous tensor."""
    return Part(name, 0, tensor.detach().reshape(-1).view(torch.uint8))


def source_of(tensors: dict[str, Tensor] | WeightSource) -> WeightSource:
    return WholeTensors(tensors) if isinstance(tensors, dict) else tensors
