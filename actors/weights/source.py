"""Ways of weights from the channel into one engine.

    call      produces                      consumes             waits for         unblocked by
    stage     a version beside the engine   the channel          its transfer      the learner
    adopt     the engine with it            the staged version   a copy in place   itself

Generation continues while a version is staged. `FetchedWeights` is for engines in this process;
`vllm_core` is for engines whose own processes receive the weights.
"""

from typing import TYPE_CHECKING, Protocol

from actors.weights.threads import in_thread
from evolver_async.errors import Inconsistency
from evolver_async.schema import WeightId
from evolver_async.weights import probe
from evolver_async.weights.channel.interface import Receiver

if TYPE_CHECKING:
    from torch import Tensor


class VersionSource(Protocol):
    """Versions that one engine can adopt."""

    def head(self) -> WeightId | None:
        """Return the newest version, None before the first; cheap."""
        ...

    def available(self) -> list[WeightId]:
        """List the versions that can be staged, oldest first."""
        ...

    async def stage(self, weights: WeightId) -> probe.Probe | None:
        """Bring a verified version beside the engine; return the probe that came with it.

        Raise WeightsGone, WeightsCorrupt or ModelError; the engine keeps its weights.
        """
        ...

    async def adopt(self, weights: WeightId) -> None:
        """Swap the engine's weights for the staged ones."""
        ...

    async def close(self) -> None:
        """Leave the channel; a second call changes nothing."""
        ...


class LocalEngine(Protocol):
    """Engine that takes tensors of this process."""

    async def update(self, weights: WeightId, tensors: "dict[str, Tensor]") -> None:
        """Swap all weights, or none and raise.

        `tensors` can become the engine's own: they no longer change.
        With `in_flight` keep, running generations continue with the new weights on their whole
        context, whose KV is computed again; with wait, they finish first while new ones queue.
        After either, KV of the old weights is not used. With keep_kv, sessions that have begun keep
        the KV they have; those that begin later use none of older weights.
        """


class FetchedWeights:
    """Source that fetches versions into this process for an engine in it."""

    def __init__(self, receiver: Receiver, engine: LocalEngine) -> None:
        self._receiver = receiver
        self._engine = engine
        self._staged: tuple[WeightId, dict[str, Tensor]] | None = None

    def head(self) -> WeightId | None:
        return self._receiver.head()

    def available(self) -> list[WeightId]:
        return self._receiver.available()

    async def stage(self, weights: WeightId) -> probe.Probe | None:
        # In a thread, as copying can take seconds.
        tensors, carried = probe.separate(await in_thread(self._receiver.fetch, weights))
        self._staged = weights, tensors
        return carried

    async def adopt(self, weights: WeightId) -> None:
        if self._staged is None or self._staged[0] != weights:
            raise Inconsistency(f"weights {weights} are not staged")
        (_, tensors), self._staged = self._staged, None
        await self._engine.update(weights, tensors)

    async def close(self) -> None:
        self._receiver.close()
