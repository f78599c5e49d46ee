"""Which weights an actor holds, and which of its tickets may sample with them now.

Rollouts share the engine with newer weights arriving; evaluations have it to themselves, with
exactly the weights that they name.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from actors.engines.base import Engine
from actors.progress import Progress
from evolver_async.config import Actors
from evolver_async.schema import SCRIPTED, Ticket, WeightId, key
from evolver_async.weights.channel.base import Receiver, WeightsGone


class WeightsLate(Exception):
    """The weights that a ticket asks for did not arrive in time."""


class WeightSync:
    """The weights of one engine. `turnover` is notified by the worker whenever a ticket ends."""

    def __init__(
        self, receiver: Receiver, engine: Engine, actors: Actors, seed: int, name: str
    ) -> None:
        self.receiver = receiver
        self.engine = engine
        self.actors = actors
        self.seed = seed
        self.name = name
        self.turnover = asyncio.Condition()
        self.oldest: WeightId | None = None  # the newest of the oldest weights that tickets allow
        self.pinned: WeightId | None = None
        self._adopting: asyncio.Task[None] | None = None
        self._rollouts = 0  # tickets that share the engine
        self._evaluations = 0  # tickets that want it, or have it, to themselves
        self._pins = 0

    def expect(self, ticket: Ticket) -> None:
        """A ticket has come: nothing older than it allows is held for it."""
        if ticket.kind == "rollout" and ticket.weights is not None:
            self.oldest = max(ticket.weights, self.oldest or ticket.weights)

    async def follow(self) -> None:
        """Adopt new weights soon after they appear, whatever is being generated."""
        while True:
            await self.adopt()
            await asyncio.sleep(self.actors.poll_s)

    async def adopt(self) -> None:
        """Hold what the configuration asks for: the pinned weights, or the head less the lag.

        Whoever asks meanwhile waits for the same copy, which goes on if one is cancelled.
        """
        if self._adopting is not None and self._adopting.done():
            self._adopting.result()  # an error whose only waiter was cancelled
            self._adopting = None
        if self._adopting is None:
            target = self.target()
            if target is None or target == self.engine.weights:
                return
            self._adopting = asyncio.create_task(self._take(target), name="adopt")
        await asyncio.shield(self._adopting)

    async def close(self) -> None:
        """Give up what is being adopted, before the engine ends."""
        if self._adopting is not None:
            self._adopting.cancel()
            await asyncio.wait([self._adopting])

    def target(self) -> WeightId | None:
        """The weights to hold; None where there are none that are new enough for the tickets."""
        if self.pinned is not None:
            return self.pinned
        head = self.receiver.head()
        if head is None:
            return None
        high, low = self.actors.weight_lag, self.actors.weight_lag_low
        lag = high
        if low >= 0:
            lag = low + key(self.seed, "lag", self.name, str(head)) % (high - low + 1)
        wanted = WeightId(lineage=head.lineage, step=max(0, head.step - lag))
        if wanted == head:
            return head
        # After a resume the lineage begins at its checkpoint's step: nothing older exists in it.
        oldest = max(wanted, self.oldest or wanted)
        return min((w for w in self.receiver.available() if oldest <= w <= head), default=None)

    async def _take(self, target: WeightId) -> None:
        fetch = self.receiver.fetch
        try:
            # By a thread, as copying may take seconds; a virtual clock would not wait for one.
            if getattr(asyncio.get_running_loop(), "virtual", False):
                tensors = fetch(target)
            else:
                tensors = await asyncio.to_thread(fetch, target)
        except WeightsGone:
            return  # a newer head has replaced them; the next look finds it
        await self.engine.update(target, tensors)

    @contextlib.asynccontextmanager
    async def weights_for(self, ticket: Ticket, progress: Progress) -> AsyncIterator[None]:
        """Hold the engine with weights that the ticket allows.

        Rollouts share it. Evaluations wait until no rollout runs, pin their weights and keep new
        rollouts out, so that nothing is sampled by weights that were not asked for. Raises
        WeightsLate.
        """
        if ticket.kind in SCRIPTED:
            yield
            return
        if ticket.kind == "eval":
            async with self._pinned(ticket, progress):
                yield
            return
        await self._turn(lambda: not self._evaluations, progress)
        self._rollouts += 1
        try:
            await self._arrival(
                ticket, lambda held: ticket.weights is None or held >= ticket.weights, progress
            )
            yield
        finally:
            self._rollouts -= 1

    @contextlib.asynccontextmanager
    async def _pinned(self, ticket: Ticket, progress: Progress) -> AsyncIterator[None]:
        self._evaluations += 1
        try:
            await self._turn(
                lambda: not self._rollouts and self.pinned in (None, ticket.weights), progress
            )
            self.pinned = ticket.weights
            self._pins += 1
            try:
                await self._arrival(ticket, lambda held: held == ticket.weights, progress)
                yield
            finally:
                self._pins -= 1
                if not self._pins:
                    self.pinned = None
        finally:
            self._evaluations -= 1

    async def _turn(self, condition: Callable[[], bool], progress: Progress) -> None:
        """Wait for `condition`; it may change whenever a ticket ends."""
        progress.queued = True
        with progress.during(None, "waiting for other tickets to leave the engine"):
            async with self.turnover:
                await self.turnover.wait_for(condition)
        progress.queued = False

    async def _arrival(
        self, ticket: Ticket, allowed: Callable[[WeightId], bool], progress: Progress
    ) -> None:
        """Wait until the engine holds allowed weights; WeightsLate after the configured time."""
        deadline = asyncio.get_running_loop().time() + self.actors.weights_timeout_s
        with progress.during(None, f"waiting for weights {ticket.weights}"):
            while True:
                await self.adopt()
                if self.engine.weights is not None and allowed(self.engine.weights):
                    return
                if asyncio.get_running_loop().time() > deadline:
                    raise WeightsLate
                await asyncio.sleep(self.actors.poll_s)
