"""Verified versions of a receiver of the `collective` channel, in its own memory.

A version is fetched by reference. Once it has been fetched and the last tensor of every fetch is
gone, as after an engine has adopted a copy, the next version that arrives takes its memory. So it
holds one run of bytes as a rule, and a second one while the engine has not adopted the first.

A version that is not here, and that the learner still keeps, is requested: an evaluation needs it,
or the engine returns from one.
"""

import threading
import weakref
from collections.abc import Sequence
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

    def served(self) -> bool:
        """True if it was fetched and is no longer in use."""
        return bool(self._fetched) and not self.in_use()


class ReceivedVersions:
    """Versions by id: one thread commits whole ones, any thread fetches them; memory is reused.

    `keep`: number of newest versions that are received; older ones only on request. `pinned`:
    memory that a GPU copies from while the host goes on. `timeout_s`: for a requested version.
    """

    def __init__(self, keep: int = 2, pinned: bool = False, timeout_s: float = 30.0) -> None:
        self.head: WeightId | None = None
        self._keep = keep
        self._pinned = pinned
        self._timeout_s = timeout_s
        self._passed: set[WeightId] = set()  # sent by the learner, which keeps them still
        self._here: dict[WeightId, ReceivedVersion] = {}
        self._requested: set[WeightId] = set()  # until they are fetched
        self._unsent: list[WeightId] = []  # requests that the learner is to be told of
        self._spare: ReceivedVersion | None = None
        self._closed = False
        self._changed = threading.Condition()

    def available(self) -> list[WeightId]:
        """List the versions that are here or come on request, oldest first."""
        with self._changed:
            return sorted(self._passed)

    def fetch(self, weights: WeightId) -> dict[str, Tensor]:
        """Return the tensors of a version, which is requested if it is not here.

        Raises WeightsGone if the learner keeps it no longer, or does not send it in time.
        """
        with self._changed:
            if weights in self._passed and weights not in self._here:
                self._requested.add(weights)
                self._unsent.append(weights)
                self._changed.wait_for(
                    lambda: self._closed or weights in self._here or weights not in self._passed,
                    self._timeout_s,
                )
            if weights not in self._here:
                raise WeightsGone(f"weights {weights} are not among those received")
            self._requested.discard(weights)
            return self._here[weights].fetch()

    def requests(self) -> list[WeightId]:
        """Return the requests since the last call."""
        with self._changed:
            unsent, self._unsent = self._unsent, []
            return unsent

    def lacks(self, weights: WeightId, kept: Sequence[WeightId]) -> bool:
        """True if a version is to be received. `kept`: those of the learner, as published."""
        with self._changed:
            if weights in self._requested:
                return weights not in self._here
            return weights not in self._passed and weights in kept[-self._keep :]

    def buffer(self, size: int) -> Tensor:
        """Provide memory for the next version; those that have served give theirs up."""
        with self._changed:
            free, self._spare = self._spare, None
            for weights in [one for one, found in self._here.items() if found.served()]:
                free = self._here.pop(weights)
        if free is not None and len(free.bytes_N) == size and not free.in_use():
            return free.bytes_N
        del free  # its memory first
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def commit(
        self,
        weights: WeightId,
        received: ReceivedVersion | None,
        kept: Sequence[WeightId],
        head: WeightId,
    ) -> None:
        """Add a version, None if it was not lacking, and drop those that are not kept.

        `head` takes effect once it has passed.
        """
        with self._changed:
            self._passed = self._passed & {*kept} | {weights}
            self._requested &= self._passed
            if received is not None:
                self._here[weights] = received
            wanted = {*kept[-self._keep :], *self._requested, weights} & self._passed
            dropped = [self._here.pop(one) for one in [*self._here] if one not in wanted]
            if dropped:
                self._spare = dropped[-1]
            if head in self._passed:
                self.head = head
            self._changed.notify_all()

    def close(self) -> None:
        """End the waits of `fetch`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
