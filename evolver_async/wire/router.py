"""Server's end of the delivery rules, without sockets.

Nothing is lost: a reply is given out after the commit of its contents. Nothing deadlocks: the
server never waits for a client (one that is gone or full loses the reply and asks again), and a
request that cannot be granted is parked for at most `park_s`, then answered WAIT. At most `PARKED`
requests are parked, the newest ones.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from evolver_async.errors import Inconsistency
from evolver_async.wire.envelope import LIMITS, Envelope, MessageLimits, WireError, pack, unpack
from evolver_async.wire.messages import (
    Beat,
    Counters,
    Fenced,
    Lease,
    Push,
    Pushes,
    Receipts,
    Reject,
    Renew,
    Reply,
    Request,
    Retry,
    Sample,
    StatusRequest,
    Wait,
)
from evolver_async.wire.sessions import NAMES, Sessions

PARK_S = 5.0  # the longest that LEASE and SAMPLE wait for a change
# As many as there are names. With fewer, the WAIT of one actor brought its next LEASE, which pushed
# another request out: beyond the limit the buffer did nothing else.
PARKED = NAMES  # past it the request that was parked for longest is answered WAIT
SILENT_S = 60.0  # a process silent for longer does not keep its name from another one
TICK_S = 0.1
BUNDLE = 16  # members in one message, at most
REQUEST_HEADER_BYTES = 1 << 20  # replies alone carry the tasks of rows
# of a request: no more bytes than one large trajectory has
REQUEST_LIMITS = MessageLimits(
    header_bytes=REQUEST_HEADER_BYTES,
    parcels=BUNDLE,
    message_bytes=REQUEST_HEADER_BYTES + LIMITS.parcel_bytes,
    container_bytes=2,
)

log = logging.getLogger(__name__)


class RequestHandler(Protocol):
    """Handler of requests behind a server. Time is a growing number of seconds."""

    def handle(self, peer: str, request: Any, now: float) -> list[Reply]:
        """Return the replies; an empty list is filled by the next `commit`."""
        ...

    def commit(self) -> None:
        """Make all decisions durable. Raises Postponed to be called again after the next tick."""
        ...

    def tick(self, now: float) -> None: ...


@runtime_checkable
class SyncsApart(Protocol):
    """Handler whose commit has two parts, so that the second one can run in another thread."""

    def write(self) -> Callable[[], None] | None:
        """Write all decisions; return the call that makes them durable, None if they are.

        It must have returned before the next `write` or `commit`. Raises Postponed as `commit`.
        """
        ...


class Postponed(RuntimeError):
    """A commit that was not done; the same commit can be tried again."""


@dataclass
class _Parked:
    route: Any
    envelope: Envelope
    wait: Wait
    since: float


@dataclass
class _PreparedReply:
    messages: list[list[bytes]]
    promises: bool  # True if it must wait for the commit


class RequestRouter:
    """Router of requests: decodes, asks the service, parks, and holds replies until the commit.

    `route`: the opaque destination of a reply, returned with it. `connected`: True if a route still
    leads to a client. `silent_s`: a client silent for longer may lose its name.
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
        self._pending: list[tuple[_Parked, list[Reply]]] = []  # replies that the commit gives

    def receive(self, route: Any, frames: list[Any], now: float) -> None:
        """Accept one message; a faulty one is answered REJECT and affects no other client."""
        try:
            envelope = unpack(frames, REQUEST_LIMITS)
        except WireError as error:
            reason = str(error)  # a log record that holds the error would hold the message as well
            log.warning("refused a message: %s", reason)
            self._reply(route, error.message_id, [Reject(reason=reason)])
            return
        request = envelope.message
        replies: list[Reply] | None
        if not isinstance(request, Request):
            replies = [Reject(reason=f"type: {type(request).__name__} is not a request")]
        elif envelope.run_id not in ("", self._run_id):
            reason = f"run: {envelope.run_id!r}, this buffer serves {self._run_id!r}"
            replies = [Reject(reason=reason)]
        else:
            replies = self._sessions.enter(envelope, route, now)
        if replies is None and isinstance(request, Pushes):
            self._handle_all(route, envelope, request, now)
        elif replies is None:
            self._handle(_Parked(route, envelope, Wait(reason=""), now), now)
        else:
            promises = not all(isinstance(reply, Reject | Fenced) for reply in replies)
            self._reply(route, envelope.message_id, replies, promises)

    def tick(self, now: float) -> None:
        self._sessions.expire(now)
        self._service.tick(now)

    def settle(self, now: float) -> list[tuple[Any, list[bytes]]]:
        """Retry the parked requests, commit, and return the replies with their routes.

        If the commit is postponed, only replies that promise nothing are returned.
        """
        sync, replies = self.begin(now, self._service.commit)
        if sync is not None:
            raise Inconsistency("replies are given before their records are on disk")
        return replies

    def begin(
        self, now: float, write: Callable[[], Callable[[], None] | None]
    ) -> tuple[Callable[[], None] | None, list[tuple[Any, list[bytes]]]]:
        """As `settle`, with this `write`; the replies are to be sent when the call has run that is
        returned first, at once if there is none."""
        for place, parked in list(self._parked.items()):
            del self._parked[place]
            if self._sessions.holds(parked.envelope):
                self._handle(parked, now)
        outbox, sync = self._outbox, None
        try:
            sync = write()
            pending, self._pending = self._pending, []
            for parked, replies in pending:
                self._answer(parked, replies)
            self._outbox = {}
        except Postponed:
            self._outbox = {key: answer for key, answer in outbox.items() if answer.promises}
            outbox = {key: answer for key, answer in outbox.items() if not answer.promises}
        return sync, [(route, frames) for (route, _), a in outbox.items() for frames in a.messages]

    def _handle_all(self, route: Any, envelope: Envelope, request: Pushes, now: float) -> None:
        """Let the service decide on one member after the other."""
        replies: list[Any] = []
        for trajectory in request.trajectories:
            replies += self._service.handle(envelope.sender, Push(trajectory=trajectory), now)
        receipts: list[Reply] = [Receipts(ids=request.ids, replies=replies)]
        self._reply(route, envelope.message_id, receipts, _promise(replies))

    def _handle(self, parked: _Parked, now: float) -> None:
        envelope, request = parked.envelope, parked.envelope.message
        place = (envelope.sender, type(request))
        earlier = self._parked.pop(place, None)
        # A process waits for one LEASE or SAMPLE at a time: it has given the earlier one up.
        if earlier and earlier.envelope.message_id != envelope.message_id:
            self._answer_wait(earlier)
        replies = self._service.handle(envelope.sender, request, now)
        if not replies:
            self._pending.append((parked, replies))
            return
        if isinstance(request, Lease | Sample) and type(replies[0]) is Wait:
            parked.wait = replies[0]
            if now - parked.since < self._park_s:
                self._parked[place] = parked
                if len(self._parked) > PARKED:
                    self._answer_wait(self._parked.pop(next(iter(self._parked))))
                return
        self._answer(parked, replies)

    def _answer(self, parked: _Parked, replies: list[Reply]) -> None:
        self._sessions.remember(parked.envelope, replies)
        telling = isinstance(parked.envelope.message, StatusRequest | Renew | Counters | Beat)
        # These replies say nothing that must be on disk first, so a full disk does not hold them up
        # and leases are still renewed.
        promises = not telling and _promise(replies)
        self._reply(parked.route, parked.envelope.message_id, replies, promises)

    def _answer_wait(self, parked: _Parked) -> None:
        """Answer WAIT to a parked request."""
        self._sessions.remember(parked.envelope, [parked.wait])
        self._reply(parked.route, parked.envelope.message_id, [parked.wait], promises=False)

    def _reply(
        self, route: Any, message_id: int, replies: list[Reply], promises: bool = True
    ) -> None:
        """Queue the replies; they replace those to an earlier copy of the request."""
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


def _promise(replies: Sequence[Reply]) -> bool:
    """True if replies say that something was done, which must be durable before."""
    return not all(isinstance(reply, Retry | Wait | Reject) for reply in replies)
