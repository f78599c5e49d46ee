"""Verified versions of a receiver of the `collective` channel, in its own memory."""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evolver_async.schema import WeightId
from evolver_async.weights.channel.base import WeightsGone
from evolver_async.weights.channel.snapshot import views


@dataclass(frozen=True)
class ReceivedVersion:
    """One verified version."""

    bytes_N: Tensor
    tensors: dict[str, dict[str, Any]]


class ReceivedVersions:
    """Versions by id: one thread commits whole ones, any thread fetches them; memory is reused."""

    def __init__(self) -> None:
        self.head: WeightId | None = None
        self._held: dict[WeightId, ReceivedVersion] = {}
        self._spare: Tensor | None = None
        self._fetching = 0
        self._lock = threading.Lock()

    def available(self) -> list[WeightId]:
        with self._lock:
            return sorted(self._held)

    def fetch(self, weights: WeightId) -> dict[str, Tensor]:
        """Copy the tensors of a version. Raises WeightsGone."""
        with self._lock:
            if weights not in self._held:
                raise WeightsGone(f"weights {weights} are not among those received")
            received = self._held[weights]
            self._fetching += 1
        try:
            return views(received.bytes_N.clone(), received.tensors)
        finally:
            with self._lock:
                self._fetching -= 1

    def buffer(self, size: int) -> Tensor:
        """Provide memory for the next version."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and len(spare) == size:
            return spare
        return torch.empty(size, dtype=torch.uint8)

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
            if dropped and not self._fetching:
                self._spare = dropped[-1].bytes_N
