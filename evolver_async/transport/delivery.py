"""The rules of delivery between a buffer and its clients, both ends, without sockets.

Why nothing is lost: a reply is given out after the commit of what it says, and a client sends the
same message id again until a reply comes, so a lost frame, a lost reply or a dead server cost a
resend; every request may arrive twice, and acts once (`sessions.py`). Why nothing deadlocks: the
server never waits for a client (one that is gone or full loses the reply and asks again), and a
request that cannot be granted is parked for at most `park_s`, then answered WAIT. At most `PARKED`
requests are parked, the newest ones.

`Desk` is the server's end, `Client` the other. How bytes travel between them is `transport.py`.
"""

import asyncio
import itertools
import logging
import random
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from evolver_async.protocol.envelope import (
    Envelope,
    MessageLimits,
    MismatchError,
    WireError,
    pack,
    unpack,
)
from evolver_async.protocol.messages import (
    Counters,
    GroupReply,
    Groups,
    Lease,
    Reject,
    Renew,
    Reply,
    Request,
    Retry,
    Sample,
    StatusRequest,
    Wait,
    Welcome,
)
from evolver_async.schema import Group, key
from evolver_async.transport.sessions import Sessions

PARK_S = 5.0  # how long LEASE and SAMPLE may wait for something to change
RESEND_S = 2.0  # first resend; doubled each time
RESEND_LIMIT_S = 10.0
PARKED = 1024  # past it the request that was parked for longest is answered WAIT
SILENT_S = 60.0  # a process silent for longer does not keep its name from another one
REQUEST_LIMITS = MessageLimits(parcels=1)  # no request carries a group

log = logging.getLogger(__name__)


class RequestHandler(Protocol):
    """What a server serves. Time is a number of seconds that only grows."""

    def handle(self, peer: str, request: Any, now: float) -> list[Reply]: ...

    def commit(self) -> None:
        """Raises Postponed where it is to be tried again after the next tick."""
        ...

    def tick(self, now: float) -> None: ...


class Postponed(RuntimeError):
    """Nothing of a commit was done; the same commit can be tried again."""


class Rejected(RuntimeError):
    """The server will never accept this request as it is."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class AccessDenied(Rejected):
    """The server does not let this client in; names the address and the key that is at fault."""


# ---- the server's side without sockets


@dataclass
class _Parked:
    route: Any
    envelope: Envelope
    wait: Wait
    since: float


@dataclass
class _PreparedReply:
    messages: list[list[bytes]]
    promises: bool  # whether it must wait for the commit


class RequestRouter:
    """Decodes, hands to the service, parks, and keeps replies back until the commit.

    `route` is whatever says where a reply goes; it is handed back with the reply. `connected`
    tells whether one still leads to a client, `silent_s` for how long a silent one keeps its name.
    """

    def __init__(
        self,
        service: RequestHandler,
        run_id: str,
        park_s: float,
        silent_s: float = SILENT_S,
        connected: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        self._service = service
        self._run_id = run_id
        self._park_s = park_s
        self._sessions = Sessions(connected, silent_s)
        self._parked: dict[tuple[str, type], _Parked] = {}  # the longest parked first
        self._outbox: dict[tuple[Any, int], _PreparedReply] = {}

    def receive(self, route: Any, frames: list[Any], now: float) -> None:
        """Takes one message; whatever is wrong with it is answered REJECT and harms nobody else."""
        try:
            envelope = unpack(frames, REQUEST_LIMITS)
        except WireError as error:
            reason = str(error)  # a log record that holds the error would hold the message as well
            log.warning("refused a message: %s", reason)
            self._reply(route, error.message_id, [Reject(reason=reason)])
            return
        request = envelope.message
        if not isinstance(request, Request):
            reason = f"type: {type(request).__name__} is not a request"
            self._reply(route, envelope.message_id, [Reject(reason=reason)])
        elif envelope.run_id not in ("", self._run_id):
            reason = f"run: {envelope.run_id!r}, this buffer serves {self._run_id!r}"
            self._reply(route, envelope.message_id, [Reject(reason=reason)])
        else:
            replies = self._sessions.enter(envelope, route, now)
            if replies is not None:
                self._reply(route, envelope.message_id, replies)
                return
            self._handle(_Parked(route, envelope, Wait(reason=""), now), now)

    def tick(self, now: float) -> None:
        self._sessions.expire(now)
        self._service.tick(now)

    def settle(self, now: float) -> list[tuple[Any, list[bytes]]]:
        """Asks again for what is parked, commits, and gives out the replies with their routes.

        Where the commit is postponed only those go out that promise nothing; the others are kept.
        """
        for place, parked in list(self._parked.items()):
            del self._parked[place]
            if self._sessions.holds(parked.envelope):
                self._handle(parked, now)
        outbox = self._outbox
        try:
            self._service.commit()
            self._outbox = {}
        except Postponed:
            self._outbox = {key: answer for key, answer in outbox.items() if answer.promises}
            outbox = {key: answer for key, answer in outbox.items() if not answer.promises}
        return [(route, frames) for (route, _), a in outbox.items() for frames in a.messages]

    def _handle(self, parked: _Parked, now: float) -> None:
        envelope, request = parked.envelope, parked.envelope.message
        place = (envelope.sender, type(request))
        earlier = self._parked.pop(place, None)
        if earlier and earlier.envelope.message_id != envelope.message_id:
            self._give_up(earlier)
        replies = self._service.handle(envelope.sender, request, now)
        if isinstance(request, Lease | Sample) and type(replies[0]) is Wait:
            parked.wait = replies[0]
            if now - parked.since < self._park_s:
                self._parked[place] = parked
                if len(self._parked) > PARKED:
                    self._give_up(self._parked.pop(next(iter(self._parked))))
                return
        self._sessions.remember(envelope, replies)
        promises = not isinstance(request, StatusRequest | Renew | Counters)
        self._reply(parked.route, envelope.message_id, replies, promises)

    def _give_up(self, parked: _Parked) -> None:
        """Answer WAIT to a parked request."""
        self._sessions.remember(parked.envelope, [parked.wait])
        self._reply(parked.route, parked.envelope.message_id, [parked.wait])

    def _reply(
        self, route: Any, message_id: int, replies: list[Reply], promises: bool = True
    ) -> None:
        """The reply to a request that was sent again takes the place of the one before."""
        messages = []
        for reply in replies:
            try:
                frames = pack(Envelope(self._run_id, "buffer", 0, message_id, reply))
            except WireError as error:
                log.error("a reply %s does not fit: %s", type(reply).__name__, error)
                reject = Reject(reason=f"the reply does not fit: {error}")
                frames = pack(Envelope(self._run_id, "buffer", 0, message_id, reject))
            messages.append(frames)
        self._outbox[route, message_id] = _PreparedReply(messages, promises)


# ---- the client's side without sockets


@dataclass
class _Pending:
    frames: list[bytes]
    reply: asyncio.Future
    parts: dict[int, Group] = field(default_factory=dict)


class Client(ABC):
    """Sends requests until they are answered. Several may be in flight."""

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

    async def request(self, message: Request, timeout_s: float | None = None) -> Any:
        """The reply; for SAMPLE the list of its groups, or Wait or Fenced.

        RETRY is obeyed here. Raises Rejected for REJECT, and TimeoutError after `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        message_id = next(self._ids)
        frames = pack(
            Envelope(self.run_id, self._sender, self.incarnation, message_id, message, self.nonce)
        )
        parks = self._park_s if isinstance(message, Lease | Sample) else 0.0
        pause, began, silent = self._resend_s, loop.time(), 0
        name = message.kind
        pending = self._pending[message_id] = _Pending(frames, loop.create_future())
        try:
            while True:
                self._send(frames)
                patience = parks + pause * self._jitter.uniform(0.8, 1.2)
                if not await self._answered(pending, patience, deadline):
                    if deadline is not None and loop.time() >= deadline:
                        raise TimeoutError(f"{name} to {self.address}: no reply in {timeout_s} s")
                    pause = min(2 * pause, max(self._resend_s, RESEND_LIMIT_S))
                    silent += 1
                    if silent > 1:
                        waited_s = loop.time() - began
                        log.warning("%s to %s: no reply for %.1f s", name, self.address, waited_s)
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

    @abstractmethod
    def close(self) -> None:
        """Lets go of the connection."""

    @abstractmethod
    def _send(self, frames: list[bytes]) -> None:
        """Sends if possible; what is not sent now is asked for again by the resend."""

    @abstractmethod
    def _poll(self) -> None:
        """Receives what has come meanwhile."""

    def _send_again(self) -> None:
        """Another server is there: what the last one had not answered, it will never answer."""
        for pending in list(self._pending.values()):
            if not pending.reply.done():
                self._send(pending.frames)

    async def _answered(self, pending: _Pending, patience: float, deadline: float | None) -> bool:
        if deadline is not None:
            patience = min(patience, deadline - asyncio.get_running_loop().time())
        await asyncio.wait((pending.reply,), timeout=max(0.0, patience))
        self._poll()  # the loop may have stood still while replies came
        return pending.reply.done()

    def _receive(self, frames: list[Any]) -> None:
        try:
            envelope = unpack(frames)
        except MismatchError as error:
            pending = self._pending.get(error.message_id)
            if pending and not pending.reply.done():
                pending.reply.set_exception(Rejected(str(error)))
            return
        except WireError as error:
            log.warning("ignored a garbled reply from %s: %s", self.address, error)
            return
        reply = envelope.message
        pending = self._pending.get(envelope.message_id)
        if pending is None or pending.reply.done():
            # a resend that was answered twice, or an answer to nothing
            log.debug("ignored %s of request %d", type(reply).__name__, envelope.message_id)
            if type(reply) is Reject and envelope.message_id == 0:
                log.warning("%s refused a message: %s", self.address, reply.reason)
        elif isinstance(reply, GroupReply):
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
