"""Receiver for adapters: received over any channel and merged into whole weights.

The base weights are read from the policy directory, once, and kept: merging always starts from
them, so that no rounding adds up from version to version.
"""

from dataclasses import dataclass

from torch import Tensor

from evolver_async.config import PolicyConfig
from evolver_async.model import lora, policy
from evolver_async.schema import WeightId
from evolver_async.weights import probe
from evolver_async.weights.channel.interface import Receiver


class Merger:
    """Merger of adapters into the whole weights of `base`, a policy directory."""

    def __init__(self, base: str, dtype: str, scale: float) -> None:
        self._directory, self._dtype, self._scale = base, dtype, scale
        self._base: dict[str, Tensor] | None = None

    def __call__(self, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Merge adapters, beside which a probe stays. ModelError if they have another base."""
        if self._base is None:
            model = policy.load_model(self._directory, dtype=self._dtype, device="cpu")
            self._base = policy.state_tensors(model)
        adapters, carried = probe.separate(adapters)
        merged = lora.merge(self._base, adapters, self._scale)
        return probe.add(merged, carried) if carried else merged


@dataclass
class MergingReceiver:
    """Receiver that merges the adapters of another receiver."""

    _receiver: Receiver
    _merge: Merger

    def head(self) -> WeightId | None:
        return self._receiver.head()

    def available(self) -> list[WeightId]:
        return self._receiver.available()

    def fetch(self, weights: WeightId) -> dict[str, Tensor]:
        return self._merge(self._receiver.fetch(weights))

    def close(self) -> None:
        self._receiver.close()


def whole(tensors: dict[str, Tensor], settings: PolicyConfig, dtype: str) -> dict[str, Tensor]:
    """Return whole weights of a type for the tensors of a checkpoint, which may be adapters."""
    rank, alpha = settings.lora.rank, settings.lora.alpha
    return Merger(settings.path, dtype, alpha / rank)(tensors) if rank else tensors
