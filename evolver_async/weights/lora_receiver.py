"""The actor's end where adapters travel: whatever channel brings them, engines get whole weights.

The base weights are read from the policy directory, once, and kept: merging always starts from
them, so that no rounding adds up from version to version.
"""

from collections.abc import Callable

from torch import Tensor

from evolver_async.config import Policy
from evolver_async.model import lora, policy
from evolver_async.schema import WeightId
from evolver_async.weights.channel.base import Receiver


class Merger:
    """Adapters in, whole weights out."""

    def __init__(self, settings: Policy) -> None:
        self._scale = settings.lora.alpha / settings.lora.rank
        self._read: Callable[[], dict[str, Tensor]] = lambda: policy.state_tensors(
            policy.load_model(settings.path, dtype=settings.dtype, device="cpu")
        )
        self._base: dict[str, Tensor] | None = None

    def __call__(self, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Raises ModelError where they belong to other weights than those of the directory."""
        if self._base is None:
            self._base = self._read()
        return lora.merge(self._base, adapters, self._scale)


class MergingReceiver:
    """A channel's end like `receiver`, whose adapters it merges."""

    def __init__(self, receiver: Receiver, merge: Merger) -> None:
        self._receiver = receiver
        self._merge = merge

    def head(self) -> WeightId | None:
        return self._receiver.head()

    def available(self) -> list[WeightId]:
        return self._receiver.available()

    def fetch(self, weights: WeightId) -> dict[str, Tensor]:
        return self._merge(self._receiver.fetch(weights))

    def close(self) -> None:
        self._receiver.close()


def merging(receiver: Receiver, settings: Policy) -> Receiver:
    """`receiver`, or, where the policy trains adapters, one that hands on whole weights."""
    return MergingReceiver(receiver, Merger(settings)) if settings.lora.rank else receiver


def whole(tensors: dict[str, Tensor], settings: Policy) -> dict[str, Tensor]:
    """The whole weights of a checkpoint's, which are adapters where the policy trains these."""
    return Merger(settings)(tensors) if settings.lora.rank else tensors
