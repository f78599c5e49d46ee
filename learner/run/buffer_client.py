"""The learner's requests to the buffer, each waited for until its reply, or until told to end."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from evolver_async.errors import TrainingError
from evolver_async.protocol import messages
from evolver_async.transport.client import Client

log = logging.getLogger(__name__)

PATIENCE_S = 1.0  # between looks at whether to wait for the buffer any longer
LAST_S = 5.0  # how long all replies to what was done are waited for when the run ends
LOG_S = 10.0
LAST = messages.Done | messages.Kept


class Stopping(Exception):
    """This learner was told to end while it waited."""


class Requests:
    """One learner's line to the buffer. `call` runs a coroutine to its end.

    Set `stopping` to end every wait: there will be no further take then.
    """

    def __init__(self, client: Client, call: Callable[..., Any]) -> None:
        self.client = client
        self.call = call
        self.stopping = False
        self.left_s = LAST_S

    def ask(self, message: messages.Request) -> Any:
        """Send to the buffer and wait; a newer learner's existence ends this one.

        Raises Stopping where `stopping` is set and no reply comes.
        """
        if self.stopping and isinstance(message, messages.Sample):
            raise Stopping("a take")
        reply = self.call(self._reply_to(message))
        if isinstance(reply, messages.Fenced):
            raise TrainingError(f"this learner is fenced: {reply.reason}")
        return reply

    def sleep(self, seconds: float) -> None:
        self.call(asyncio.sleep(seconds))

    def now(self) -> float:
        """Time of the loop in seconds, virtual where the loop is."""
        return self.call(_loop_time())

    async def _reply_to(self, message: messages.Request) -> Any:
        """The reply, however long it takes, until `stopping`.

        Then only the reply to DONE and KEPT is worth the time that a busy disk takes: without it
        the last step would be in the checkpoint, but not in the metrics.
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
