"""Requests of the learner to the buffer, each awaited until its reply or the learner's end."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from evolver_async.errors import TrainingError
from evolver_async.process.package_versions import versions
from evolver_async.wire import messages
from evolver_async.wire.client import Client, Rejected
from evolver_async.wire.envelope import SCHEMA_HASH

log = logging.getLogger(__name__)

PATIENCE_S = 1.0  # between checks of `stopping`
LAST_S = 5.0  # for all replies to LAST when the run ends
LOG_S = 10.0
LAST = messages.Done | messages.Kept


class Stopping(Exception):
    """Raised if this learner is stopped while it waits."""


class Requests:
    """Blocking requests to the buffer; `call` runs a coroutine to its end.

    Set `stopping` to end every wait; there is no further take then.
    """

    def __init__(self, client: Client, call: Callable[..., Any]) -> None:
        self.client = client
        self.call = call
        self.stopping = False
        self.left_s = LAST_S

    def greet(self) -> None:
        """Tell the buffer this learner's host and versions, which it compares with its own.

        TrainingError if the buffer refuses them. If `stopping` is set, no reply is needed.
        """
        host, pid = socket.gethostname(), os.getpid()
        hello = messages.Hello(role="learner", schema_hash=SCHEMA_HASH, host=host, pid=pid)
        hello.versions = versions()
        try:
            with contextlib.suppress(Stopping):
                self.ask(hello)
        except Rejected as error:
            raise TrainingError(f"the buffer refused this learner: {error}") from error

    def ask(self, message: messages.Request) -> Any:
        """Send a message and return the reply.

        TrainingError if a newer learner exists; Stopping if `stopping` is set and no reply comes.
        """
        if self.stopping and isinstance(message, messages.Sample):
            raise Stopping("a take")
        reply = self.call(self._reply_to(message))
        if isinstance(reply, messages.Fenced):
            raise TrainingError(f"the buffer has fenced this learner: {reply.reason}")
        return reply

    def sleep(self, seconds: float) -> None:
        self.call(asyncio.sleep(seconds))

    def now(self) -> float:
        """Return the time of the loop in seconds; it is virtual in a serial run."""
        return self.call(_loop_time())

    async def _reply_to(self, message: messages.Request) -> Any:
        """Wait for the reply without a limit, until `stopping`.

        Then only replies to DONE and KEPT are awaited, for a short time: without them the last step
        is in the checkpoint, but not in the metrics.
        """
        name = message.kind
        request = asyncio.ensure_future(self.client.request(message))
        waited_s = 0.0
        try:
            while not (await asyncio.wait([request], timeout=PATIENCE_S))[0]:
                if self.stopping:
                    self.left_s -= PATIENCE_S
                    if self.left_s < PATIENCE_S or not isinstance(message, LAST):
                        raise Stopping(f"the reply to {name}")
                waited_s += PATIENCE_S
                if waited_s % LOG_S == 0 and not isinstance(message, messages.Sample):
                    log.warning("no reply to %s for %.0f s", name, waited_s)
            return request.result()
        finally:
            request.cancel()


async def _loop_time() -> float:
    return asyncio.get_running_loop().time()
