"""Weight synchronisation of an actor's engine, and admission of tickets to it.

Rollouts share the engine while newer weights arrive; evaluations use it exclusively, with exactly
the weights that they name.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from actors.engines.engine import Engine
from actors.ticket_progress import TicketProgress
from actors.weights.arrival import ArrivalCheck
from actors.weights.source import VersionSource
from evolver_async.config import ActorsConfig
from evolver_async.metrics.activity import AWAITING, LOADING, ActivityClock
from evolver_async.model.tokenizer import ModelError
from evolver_async.randomness import key
from evolver_async.schema import SCRIPTED, Ticket, WeightId
from evolver_async.weights.channel.interface import WeightsCorrupt, WeightsGone
from evolver_async.wire.failure_totals import FailureKind

log = logging.getLogger(__name__)


class WeightsLate(Exception):
    """Timeout of a ticket that waits for its weights."""


class NotedFailures(Protocol):
    """The part of `actors.failure_counts.FailureCounts` that the synchronisation uses."""

    def note(self, kind: FailureKind, name: str, error: str) -> None: ...


@dataclass(eq=False)
class WeightSync:
    """Weights of one engine. The worker notifies `turnover` when a ticket ends."""

    source: VersionSource
    engine: Engine
    arrival: ArrivalCheck
    actors: ActorsConfig
    seed: int
    name: str
    clock: ActivityClock
    failures: NotedFailures
    turnover: asyncio.Condition = field(default_factory=asyncio.Condition)
    visible: WeightId | None = None  # the newest that the source could stage when last asked
    oldest: WeightId | None = None  # maximum over tickets of the oldest weights they allow
    pinned: WeightId | None = None
    _unusable: WeightId | None = None  # the last that could not be adopted, ...
    _retry_at: float = 0.0  # ... and the loop's time from which they are tried again
    _adopting: asyncio.Task[None] | None = None
    _checking: asyncio.Task[None] | None = None
    _rollouts: int = 0  # tickets that share the engine
    _evaluations: int = 0  # tickets that wait for exclusive use, or have it
    _pins: int = 0

    def expect(self, ticket: Ticket) -> None:
        """Note the oldest weights that a new ticket allows. An evaluation pins its own."""
        if ticket.kind != "eval" and ticket.weights is not None:
            self.oldest = max(ticket.weights, self.oldest or ticket.weights)

    @property
    def seen(self) -> tuple[WeightId | None, WeightId | None]:
        """The weights that the engine holds, and the newest that it could fetch."""
        return self.engine.weights, self.visible

    async def follow(self) -> None:
        """Adopt new weights when they appear, also during generation."""
        while True:
            self.visible = self.source.head()
            await self.adopt()
            await asyncio.sleep(self.actors.poll_s)

    async def adopt(self) -> None:
        """Load the pinned weights, or else the head minus the configured lag.

        Concurrent calls wait for the same copy, which continues if one call is cancelled. The
        engine keeps its weights if these are unusable, and tries them again at intervals.
        """
        if self._adopting is not None and self._adopting.done():
            self._adopting.result()  # an error whose only waiter was cancelled
            self._adopting = None
        if self._adopting is None:
            target = self.target()
            if target is None or target == self.engine.weights:
                return
            if target == self._unusable and asyncio.get_running_loop().time() < self._retry_at:
                return
            self._adopting = asyncio.create_task(self._take(target), name="adopt")
        await asyncio.shield(self._adopting)

    async def close(self) -> None:
        """Cancel a running copy and check; call this before the engine is closed."""
        running = [task for task in (self._adopting, self._checking) if task is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def target(self) -> WeightId | None:
        """Return the weights to load; None if none are new enough for the tickets."""
        if self.pinned is not None:
            return self.pinned
        head = self.source.head()
        if head is None:
            return None
        high, low = self.actors.weight_lag, self.actors.weight_lag_low
        lag = high
        if low >= 0:
            lag = low + key(self.seed, "lag", self.name, str(head)) % (high - low + 1)
        wanted = WeightId(lineage=head.lineage, step=max(0, head.step - lag))
        if wanted == head:
            return head
        # After a resume the lineage starts at its checkpoint's step and has no older weights.
        oldest = max(wanted, self.oldest or wanted)
        return min((w for w in self.source.available() if oldest <= w <= head), default=None)

    async def _take(self, target: WeightId) -> None:
        fetched = False
        try:
            probe = await self.source.stage(target)
            if self._checking is not None:
                await self._checking  # of the version before, which the engine still holds
            fetched = True
            with self.clock.during(LOADING):
                await self.source.adopt(target)
        except WeightsGone:
            return  # replaced by a newer head, which the next call finds
        except (WeightsCorrupt, ModelError) as error:
            held = self.engine.weights
            if held is None:
                raise  # there are no weights to go on with
            self._unusable = target
            # What was damaged on its way may come whole; what the engine rejects stays unfit.
            now_s = asyncio.get_running_loop().time()
            self._retry_at = math.inf if fetched else now_s + self.actors.weights_timeout_s
            log.error("weights %s are unusable, the engine keeps %s: %s", target, held, error)
            self.failures.note("weights", "update", f"{target}: {error}")
            return
        if probe is not None:
            # Beside generation: tickets do not wait for it.
            check = self.arrival.check(target, probe)
            self._checking = asyncio.create_task(check, name="check")

    @contextlib.asynccontextmanager
    async def weights_for(self, ticket: Ticket, progress: TicketProgress) -> AsyncIterator[None]:
        """Hold the engine with weights that the ticket allows. Raise WeightsLate.

        Rollouts share it. Evaluations wait until no rollout runs, pin their weights and block new
        rollouts, so that every token of an evaluation comes from the named weights.
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
    async def _pinned(self, ticket: Ticket, progress: TicketProgress) -> AsyncIterator[None]:
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

    async def _turn(self, condition: Callable[[], bool], progress: TicketProgress) -> None:
        """Wait for `condition`, which can change when a ticket ends."""
        progress.queued = True
        doing = "waiting for other tickets to leave the engine"
        with progress.during(None, doing, shared=True):
            async with self.turnover:
                await self.turnover.wait_for(condition)
        progress.queued = False

    async def _arrival(
        self, ticket: Ticket, allowed: Callable[[WeightId], bool], progress: TicketProgress
    ) -> None:
        """Wait until the engine holds allowed weights. Raise WeightsLate on timeout."""
        deadline = asyncio.get_running_loop().time() + self.actors.weights_timeout_s
        waiting = progress.during(None, f"waiting for weights {ticket.weights}")
        with waiting, self.clock.during(AWAITING):
            while True:
                await self.adopt()
                if self.engine.weights is not None and allowed(self.engine.weights):
                    return
                if asyncio.get_running_loop().time() > deadline:
                    raise WeightsLate
                await asyncio.sleep(self.actors.poll_s)
