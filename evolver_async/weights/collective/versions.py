"""What a receiver of the `collective` channel holds: verified versions in its own memory."""

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
    """A version as it was verified."""

    bytes_N: Tensor
    tensors: dict[str, dict[str, Any]]


class ReceivedVersions:
    """Versions come whole, by one thread; any may fetch them. Memory is used again."""

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
        """A copy of the tensors. Raises WeightsGone."""
        with self._lock:
            if weights not in self._held:
                raise WeightsGone(f"weights {weights} are not among those that came")
            received = self._held[weights]
            self._fetching += 1
        try:
            return views(received.bytes_N.clone(), received.tensors)
        finally:
            with self._lock:
                self._fetching -= 1

    def buffer(self, size: int) -> Tensor:
        """Memory for a version that is about to come."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and len(spare) == size:
            return spare
        return torch.empty(size, dtype=torch.uint8)

    def commit(
        self, weights: WeightId, received: ReceivedVersion, held: set[WeightId], head: WeightId
    ) -> None:
        """Take a version in and drop what is not in `held`; `head` counts once it is here."""
        with self._lock:
            dropped = [self._held.pop(one) for one in [*self._held] if one not in held]
            if weights in self._held:
                dropped.append(self._held.pop(weights))
            self._held[weights] = received
            if head in self._held:
                self.head = head
            if dropped and not self._fetching:
                self._spare = dropped[-1].bytes_N
