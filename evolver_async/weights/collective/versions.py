"""Verified versions of a receiver of the `collective` channel, in its own memory.

A version is fetched by reference. Its memory is used again once it is dropped and the last tensor
of every fetch is gone.
"""

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evolver_async.schema import Array, WeightId
from evolver_async.weights.channel.byte_layout import views
from evolver_async.weights.channel.interface import WeightsGone


@dataclass(frozen=True)
class ReceivedVersion:
    """One verified version."""

    bytes_N: Tensor
    tensors: dict[str, dict[str, Any]]
    _fetched: "list[weakref.ref[Array]]" = field(default_factory=list)

    def fetch(self) -> dict[str, Tensor]:
        """Return the tensors, which share an array that lives as long as any of them does."""
        array_N = self.bytes_N.numpy()[:]
        self._fetched[:] = [one for one in self._fetched if one() is not None]
        self._fetched.append(weakref.ref(array_N))
        return views(torch.from_numpy(array_N), self.tensors)

    def in_use(self) -> bool:
        return any(one() is not None for one in self._fetched)


class ReceivedVersions:
    """Versions by id: one thread commits whole ones, any thread fetches them; memory is reused.

    `pinned`: memory that a GPU copies from while the host goes on.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.head: WeightId | None = None
        self._held: dict[WeightId, ReceivedVersion] = {}
        self._spare: ReceivedVersion | None = None
        self._pinned = pinned
        self._lock = threading.Lock()

    def available(self) -> list[WeightId]:
        with self._lock:
            return sorted(self._held)

    def fetch(self, weights: WeightId) -> dict[str, Tensor]:
        """Return the tensors of a version. Raises WeightsGone."""
        with self._lock:
            if weights not in self._held:
                raise WeightsGone(f"weights {weights} are not among those received")
            return self._held[weights].fetch()

    def buffer(self, size: int) -> Tensor:
        """Provide memory for the next version."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and len(spare.bytes_N) == size and not spare.in_use():
            return spare.bytes_N
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def commit(
        self, weights: WeightId, received: ReceivedVersion, held: set[WeightId], head: WeightId
    ) -> None:
        """Add a version and drop those not in `held`; `head` takes effect once it is here."""
        with self._lock:
            dropped = [self._held.pop(one) for one in [*self._held] if one not in held]
            if weights in self._held:
                dropped.append(self._held.pop(weights))
            self._held[weights] = received
            if head in self._held:
                self.head = head
            if dropped:
                self._spare = dropped[-1]
