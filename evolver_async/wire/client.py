"""Client's end of the delivery rules, without sockets.

A request is sent again under the same message id until a reply comes, so a lost frame, a lost reply
or a dead server costs a resend; every request may arrive twice and acts once (`sessions`). PUSHes
of the same turn of the loop travel in one message (`bundles`).
"""

import asyncio
import itertools
import logging
import random
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from evolver_async.randomness import key
from evolver_async.schema import Group
from evolver_async.wire.bundles import Bundles
from evolver_async.wire.envelope import Envelope, WireError, pack, unpack
from evolver_async.wire.messages import (
    GroupReply,
    Groups,
    Lease,
    Push,
    Receipts,
    Reject,
    Request,
    Retry,
    Sample,
    StatusRequest,
    Welcome,
)
from evolver_async.wire.router import PARK_S
from evolver_async.wire.trajectory_bytes import Parcel, wrap

RESEND_S = 2.0  # first resend; doubled each time
RESEND_LIMIT_S = 10.0

log = logging.getLogger(__name__)


class Rejected(RuntimeError):
    """A request that the server will never accept as it is."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class AccessDenied(Rejected):
    """A client that the server does not admit; the message names the address and the key."""


@dataclass
class _Pending:
    """A request that waits for its reply. `sent`: its frames, or the trajectory of a PUSH;
    `came`: number of parts of a reply that have come, those of its copies included."""

    sent: list[bytes] | Parcel
    reply: asyncio.Future
    parts: dict[int, Group] = field(default_factory=dict)
    came: int = 0


class Client(ABC):
    """Client that sends requests until they are answered. Several may be in flight."""

    def __init__(
        self,
        address: str,
        run_id: str,
        sender: str,
        incarnation: int,
        *,
        park_s: float = PARK_S,
        resend_s: float = RESEND_S,
    ) -> None:
        self.address = address
        self.run_id = run_id  # "" until a WELCOME names it
        self.incarnation = incarnation
        self.nonce = secrets.token_hex(8)  # of this process; seeds nothing
        self._sender = sender
        self._park_s = park_s
        self._resend_s = resend_s
        self._jitter = random.Random(key(incarnation, "resend", sender))
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._bundles = Bundles()

    async def request(self, message: Request, timeout_s: float | None = None) -> Any:
        """Send a request and return the reply; for SAMPLE a list of groups, Wait or Fenced.

        RETRY is obeyed here. Raises Rejected for REJECT, and TimeoutError after `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        message_id = next(self._ids)
        sent = wrap(message.trajectory) if isinstance(message, Push) else None
        pending = _Pending(sent or pack(self._envelope(message_id, message)), loop.create_future())
        parks = self._park_s if isinstance(message, Lease | Sample) else 0.0
        pause, began, silent = self._resend_s, loop.time(), 0
        name = message.kind
        self._pending[message_id] = pending
        try:
            while True:
                # While the server is away a copy would only be queued behind the first one. After
                # an hour the server would get hundreds of copies before any RENEW.
                if not silent or self._connected():
                    self._transmit(message_id, pending)
                patience = parks + pause * self._jitter.uniform(0.8, 1.2)
                if not await self._answered(pending, patience, deadline):
                    if deadline is not None and loop.time() >= deadline:
                        raise TimeoutError(f"{name} to {self.address}: no reply in {timeout_s} s")
                    pause = min(2 * pause, max(self._resend_s, RESEND_LIMIT_S))
                    silent += 1
                    obstacle = self._obstacle()
                    if silent > 1:
                        waited_s, words = loop.time() - began, "%s to %s: no reply for %.1f s%s"
                        log.warning(words, name, self.address, waited_s, obstacle)
                    continue
                reply = pending.reply.result()
                if type(reply) is Reject:
                    raise Rejected(reply.reason)
                if type(reply) is not Retry:
                    return reply
                pending.reply = loop.create_future()
                began, silent = loop.time(), 0
                left = reply.seconds if deadline is None else deadline - loop.time()
                await asyncio.sleep(min(reply.seconds, left))
        finally:
            del self._pending[message_id]
            self._bundles.drop(message_id)

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @abstractmethod
    def _send(self, frames: list[bytes]) -> None:
        """Send if possible; otherwise the resend tries again."""

    @abstractmethod
    def _poll(self) -> None:
        """Receive the replies that have arrived."""

    def _connected(self) -> bool:
        """False if a copy of a request would only be queued behind it, to be sent with it."""
        return True

    def _obstacle(self) -> str:
        """Return what is known to keep replies away, behind ": "; else "". Asked after silence."""
        return ""

    def fail(self, error: Exception) -> None:
        """Raise an error in all unanswered requests."""
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(error)

    def _transmit(self, message_id: int, pending: _Pending) -> None:
        """Send a request; a PUSH together with the others of this turn of the loop."""
        if not isinstance(pending.sent, Parcel):
            self._send(pending.sent)
        elif self._bundles.add(message_id, pending.sent):
            asyncio.get_running_loop().call_soon(self._send_bundles)

    def _send_bundles(self) -> None:
        try:
            for frames in self._bundles.empty(self._envelope(0, StatusRequest()), self._ids):
                self._send(frames)
        except Exception as error:  # nothing awaits this call; the requests wait for replies
            self.fail(error)

    def _envelope(self, message_id: int, message: Request) -> Envelope:
        return Envelope(
            self.run_id, self._sender, self.incarnation, message_id, message, self.nonce
        )

    async def _answered(self, pending: _Pending, patience: float, deadline: float | None) -> bool:
        """True if the reply comes; wait on while parts of it come, as a copy would come behind."""
        now, came = asyncio.get_running_loop().time, -1
        # A large take can be on its way for longer than the patience. A copy of the SAMPLE would
        # bring all groups again and hold up the next reply.
        while came < pending.came and not pending.reply.done():
            came = pending.came
            left = patience if deadline is None else min(patience, deadline - now())
            await asyncio.wait((pending.reply,), timeout=max(0.0, left))
            self._poll()  # the loop may have stood still while replies came
            if deadline is not None and now() >= deadline:
                break
        return pending.reply.done()

    def _receive(self, frames: list[Any]) -> None:
        try:
            envelope = unpack(frames)
        except WireError as error:
            if not error.message_id:
                log.warning("ignored a garbled reply from %s: %s", self.address, error)
                return
            # of another version, or of too many parts: a resend would bring the same
            for message_id in self._bundles.members(error.message_id):
                pending = self._pending.get(message_id)
                if pending and not pending.reply.done():
                    pending.reply.set_exception(Rejected(f"unreadable reply: {error}"))
            return
        reply = envelope.message
        if isinstance(reply, Receipts):
            for message_id, receipt in zip(reply.ids, reply.replies, strict=False):
                pending = self._pending.get(message_id)
                if pending is not None and not pending.reply.done():
                    pending.reply.set_result(receipt)
            return
        if isinstance(reply, Reject) and (again := self._bundles.split(envelope.message_id)):
            for message_id in again:
                self._transmit(message_id, self._pending[message_id])
            return
        pending = self._pending.get(envelope.message_id)
        if pending is None or pending.reply.done():
            # a resend that was answered twice, or an answer to nothing
            log.debug("ignored %s of request %d", type(reply).__name__, envelope.message_id)
            if type(reply) is Reject and envelope.message_id == 0:
                log.warning("%s refused a message: %s", self.address, reply.reason)
        elif isinstance(reply, GroupReply):
            pending.came += 1
            pending.parts.pop(reply.group.group_id, None)  # the newest stream's order counts
            pending.parts[reply.group.group_id] = reply.group
        elif isinstance(reply, Groups):
            if len(pending.parts) == reply.count:
                pending.reply.set_result(list(pending.parts.values()))
            else:
                log.warning("%d of %d groups came", len(pending.parts), reply.count)
                pending.parts.clear()
        else:
            if isinstance(reply, Welcome) and not self.run_id:
                self.run_id = reply.run_id
            pending.reply.set_result(reply)
