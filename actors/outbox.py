"""Delivery of finished trajectories, which continues after the end of their ticket."""

import asyncio
import logging
from functools import partial
from typing import Any

from actors.envs.base import EnvironmentFailure
from actors.failure_counts import FailureCounts
from evolver_async.metrics.activity import DELIVERING, ActivityClock
from evolver_async.schema import Ticket, Trajectory
from evolver_async.wire import messages
from evolver_async.wire.bounded import WireError
from evolver_async.wire.client import Client

log = logging.getLogger(__name__)


class Outbox:
    """Finished trajectories of one ticket. `delivered`: members whose delivery is acknowledged.

    `failures` counts trajectories that cannot be sent.
    """

    def __init__(
        self, client: Client, clock: ActivityClock, ticket: Ticket, failures: FailureCounts
    ) -> None:
        self.delivered: set[int] = set()
        self._client = client
        self._clock = clock
        self._ticket = ticket
        self._failures = failures
        self._sending: set[asyncio.Task[Any]] = set()

    @property
    def missing(self) -> list[int]:
        """Members of the ticket that are not delivered."""
        return sorted(set(self._ticket.members) - self.delivered)

    def send(self, trajectory: Trajectory) -> "asyncio.Task[Any]":
        """Send a trajectory; the task ends when the buffer has stored it.

        It may raise Rejected, or EnvironmentFailure if the trajectory is too large to send.
        """
        task = asyncio.create_task(self._push(trajectory), name=trajectory.trajectory_id)
        self._sending.add(task)
        task.add_done_callback(partial(self._sent, trajectory.member))
        return task

    async def _push(self, trajectory: Trajectory) -> Any:
        try:
            with self._clock.during(DELIVERING):
                return await self._client.request(messages.Push(trajectory=trajectory))
        except WireError as error:
            task = self._ticket.task
            where = f"task {task.task_id}, member {trajectory.member}"
            failure = EnvironmentFailure(task.env, where, "sending the episode", error)
            self._failures.note(failure.kind, failure.name, failure.error)
            raise failure from error

    async def settle(self, within_s: float) -> None:
        """Wait at most `within_s` for outstanding replies, then cancel them."""
        under_way = set(self._sending)
        if not under_way:
            return
        _, late = await asyncio.wait(under_way, timeout=within_s)
        for task in late:
            log.warning("trajectory %s was not taken in %.1f s", task.get_name(), within_s)
            task.cancel()

    def _sent(self, member: int, task: "asyncio.Task[Any]") -> None:
        self._sending.discard(task)
        if task.cancelled():
            return
        if task.exception() is None:
            self.delivered.add(member)
        else:
            log.error("trajectory %s: %s", task.get_name(), task.exception())
