"""Actor's end for adapters: received over any channel and merged into whole weights.

The base weights are read from the policy directory, once, and kept: merging always starts from
them, so that no rounding adds up from version to version.
"""

from dataclasses import dataclass

from torch import Tensor

from evolver_async.config import PolicyConfig
from evolver_async.model import lora, policy
from evolver_async.schema import WeightId
from evolver_async.weights.channel.base import Receiver


class Merger:
    """Merger of adapters into whole weights."""

    def __init__(self, settings: PolicyConfig) -> None:
        self._settings = settings
        self._base: dict[str, Tensor] | None = None

    def __call__(self, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Merge adapters. Raises ModelError if they belong to other base weights."""
        settings = self._settings
        if self._base is None:
            model = policy.load_model(settings.path, dtype=settings.dtype, device="cpu")
            self._base = policy.state_tensors(model)
        return lora.merge(self._base, adapters, settings.lora.alpha / settings.lora.rank)


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


def merging(receiver: Receiver, settings: PolicyConfig) -> Receiver:
    """Wrap `receiver` in a merging one if the policy trains adapters."""
    return MergingReceiver(receiver, Merger(settings)) if settings.lora.rank else receiver


def whole(tensors: dict[str, Tensor], settings: PolicyConfig) -> dict[str, Tensor]:
    """Return whole weights for the tensors of a checkpoint, which may be adapters."""
    return Merger(settings)(tensors) if settings.lora.rank else tensors
