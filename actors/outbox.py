"""Finished trajectories on their way: what ends their ticket does not stop them."""

import asyncio
import logging
from functools import partial
from typing import Any

from evolver_async.protocol import messages
from evolver_async.schema import Trajectory
from evolver_async.transport.client import Client

log = logging.getLogger(__name__)


class Outbox:
    """The finished trajectories of one ticket. `delivered`: members whose reply has come."""

    def __init__(self, client: Client) -> None:
        self.delivered: set[int] = set()
        self._client = client
        self._sending: set[asyncio.Task[Any]] = set()

    def send(self, trajectory: Trajectory) -> "asyncio.Task[Any]":
        """Hands it in; the task ends when the buffer has it on disk, and may raise Rejected."""
        push = self._client.request(messages.Push(trajectory=trajectory))
        task = asyncio.create_task(push, name=trajectory.trajectory_id)
        self._sending.add(task)
        task.add_done_callback(partial(self._sent, trajectory.member))
        return task

    async def settle(self, within_s: float) -> None:
        """Wait so long for the replies to what is under way, then give it up."""
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
