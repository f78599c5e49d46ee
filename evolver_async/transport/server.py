"""Server over ZeroMQ, and the rules that both ends of the transport follow.

    client (DEALER)                         server (ROUTER), one thread
    request ──send, resend until a reply──▶ receive all waiting → service.handle each
                                            → parked requests again → service.commit() once
    reply   ◀────────────────────────────── send, only now

Nothing is lost: `router` gives out a reply only after the commit of its contents, and `client`
sends the same message id again until a reply comes. `in_process` does the same within one asyncio
loop, without sockets.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from evolver_async.protocol.envelope import Envelope, pack
from evolver_async.protocol.messages import Ok
from evolver_async.transport.addresses import refuse_open_or_served
from evolver_async.transport.curve import KeyAuthenticator
from evolver_async.transport.router import PARK_S, SILENT_S, TICK_S, RequestHandler, RequestRouter
from evolver_async.transport.sockets import LINGER_MS, REPLIES_QUEUED, set_options

BATCH_MESSAGES = 512
BATCH_BYTES = 64 << 20
BATCH_S = 0.02  # the longest that the first message of a batch waits for the commit to begin

log = logging.getLogger(__name__)


class Server:
    """Server of one service at one address; `serve` runs in one thread.

    With `keys`, a directory made by `evolver-async keys`, only the clients listed there are
    admitted. Raises ValueError if the address would be open to others or the keys cannot be used,
    OSError if it is in use.
    """

    def __init__(
        self,
        service: RequestHandler,
        address: str,
        run_id: str,
        *,
        keys: Path | None = None,
        park_s: float = PARK_S,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = RequestRouter(service, run_id, park_s, silent_s, self._connected)
        self._probe = pack(Envelope(run_id, "buffer", 0, 0, Ok()))
        self._clock = clock
        self._context, self._socket, self._authenticator = _bind(address, keys)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if self._authenticator is not None:
            self._poller.register(self._authenticator.socket, zmq.POLLIN)
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)

    def serve(self, stop: threading.Event | Callable[[], bool]) -> None:
        """Receive, handle, commit and reply until `stop`, checked at least every 100 ms."""
        stopped = stop.is_set if isinstance(stop, threading.Event) else stop
        next_tick = self._clock()
        while not stopped():
            self._poller.poll(max(0, round(1000 * (next_tick - self._clock()))))
            if self._authenticator is not None:
                self._authenticator.answer()
            now = self._clock()
            received = self._receive_batch(now)
            if now >= next_tick:
                self._router.tick(now)
                next_tick = now + TICK_S
            elif not received:
                continue
            for identity, frames in self._router.settle(now):
                self._send(identity, frames)

    def close(self) -> None:
        """Send the remaining replies for at most a second; free the address."""
        self._socket.close(linger=LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.socket.close(linger=0)
        self._context.term()  # waits for the socket file to be gone, which close alone does not

    def _receive_batch(self, now: float) -> int:
        """Handle the waiting messages, up to a bound; return their number."""
        size = 0
        for received in range(BATCH_MESSAGES):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return received
            self._router.receive(identity, frames, now)
            size += sum(map(len, frames))
            if size >= BATCH_BYTES or self._clock() - now >= BATCH_S:
                return received + 1
        return BATCH_MESSAGES

    def _connected(self, identity: bytes) -> bool:
        """True if a client is connected: a reply to no request, which it ignores, can be sent."""
        try:
            self._socket.send_multipart([identity, *self._probe], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno != zmq.EHOSTUNREACH
        return True

    def _send(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.debug("no reply to %r: %s", identity, error.strerror)


def check_address(address: str, keys: Path | None = None) -> None:
    """Raise the errors that a `Server` at `address` would raise."""
    context, *_ = _bind(address, keys)
    context.destroy(linger=0)


def _bind(
    address: str, keys: Path | None
) -> tuple[zmq.Context, zmq.Socket, KeyAuthenticator | None]:
    refuse_open_or_served(address, keyed=keys is not None)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    set_options(router)
    router.set(zmq.ROUTER_MANDATORY, 1)  # a reply to a missing client is an error
    router.set(zmq.SNDHWM, REPLIES_QUEUED)
    router.set(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects takes its name over
    try:
        door = None if keys is None else KeyAuthenticator(context, router, keys)
        router.bind(address)
    except (zmq.ZMQError, ValueError) as error:
        context.destroy(linger=0)
        if isinstance(error, ValueError):
            raise
        code = error.errno or 0
        raise OSError(code, f"{address}: {zmq.strerror(code).lower()}") from error
    return context, router, door
