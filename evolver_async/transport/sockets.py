"""How requests and replies travel: over ZeroMQ, or within one asyncio loop.

    client (DEALER)                         server (ROUTER), one thread
    request ──send, resend until a reply──▶ receive all that waits → service.handle each
                                            → parked requests again → service.commit() once
    reply   ◀────────────────────────────── send, only now

The rules, and why nothing is lost or deadlocks, are in `delivery.py`. `LocalServer` and
`LocalClient` are the twin for serial runs: same bytes, same rules, the loop's clock (which may be
virtual), no sockets and no threads. Of ZeroMQ only keys are elsewhere: `curve.py`, `keys.py`.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from evolver_async.protocol.envelope import LIMITS, Envelope, pack
from evolver_async.protocol.messages import Ok
from evolver_async.transport.addresses import from_here, refuse_open_or_served
from evolver_async.transport.curve import Handshake, KeyAuthenticator
from evolver_async.transport.delivery import (
    PARK_S,
    RESEND_S,
    SILENT_S,
    AccessDenied,
    Client,
    Rejected,
    RequestHandler,
    RequestRouter,
)

__all__ = [
    "AccessDenied",
    "Client",
    "DealerClient",
    "LocalClient",
    "LocalServer",
    "Rejected",
    "RequestHandler",
    "Server",
    "check_address",
]

TICK_S = 0.1
BATCH_MESSAGES = 512
BATCH_BYTES = 64 << 20
BATCH_S = 0.02  # so long may the first message of a batch wait for the commit to begin
REPLIES_QUEUED = 100_000  # per client; past it replies are dropped and asked for again
LINGER_MS = 1000
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 10_000

log = logging.getLogger(__name__)


# ---- sockets


class Server:
    """Serves one service at one address; run `serve` in one thread.

    With `keys`, a directory made by `evolver-async keys`, only the clients listed there get in.
    Raises ValueError where the address would be open to others or the keys cannot be used, OSError
    where it is in use.
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
        """Receives, handles, commits and replies until `stop`; checked at least every 100 ms."""
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
        """Sends what is left for at most a second; the address is free afterwards."""
        self._socket.close(linger=LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.socket.close(linger=0)
        self._context.term()  # waits for the socket file to be gone, which close alone does not

    def _receive_batch(self, now: float) -> int:
        """Handles all messages that wait, up to a bound; the number of them."""
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


class DealerClient(Client):
    """A client over ZeroMQ, for one asyncio loop at a time; the loop may stand still in between.

    Replies are read in the loop's own file-descriptor callback and once more at every send and
    every timeout, so none depends on a task that runs in the background. With `keys` the connection
    is encrypted; where the server does not let this client in, every request raises Refused.
    """

    def __init__(
        self,
        address: str,
        run_id: str = "",
        sender: str = "",
        incarnation: int = 0,
        *,
        keys: Path | None = None,
        park_s: float = PARK_S,
        resend_s: float = RESEND_S,
    ) -> None:
        super().__init__(address, run_id, sender, incarnation, park_s=park_s, resend_s=resend_s)
        if not sender:
            raise ValueError("sender: every client needs a name of its own")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections = 0
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        _set_options(self._socket)
        self._socket.set(zmq.RCVHWM, REPLIES_QUEUED)
        # The same after a reconnect, so that a parked request's reply still finds its way; with the
        # nonce, since a second process of this name would take the connection over.
        self._socket.set(zmq.ROUTING_ID, f"{self.nonce}/{sender}/{incarnation}".encode()[:255])
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            self._handshake = Handshake(self._socket, address, keys)
            self._socket.connect(from_here(address))
        except zmq.ZMQError as error:
            self._abandon()
            said = zmq.strerror(error.errno or 0).lower()
            raise ValueError(f"{address}: no address to connect to ({said})") from None
        except ValueError:
            self._abandon()
            raise

    def close(self) -> None:
        self._detach()
        self._socket.disable_monitor()
        self._socket.close(linger=LINGER_MS)

    def _send(self, frames: list[bytes]) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._detach()
            for zmq_socket in (self._socket, self._handshake.monitor):
                loop.add_reader(zmq_socket.fileno(), self._poll)
            self._loop = loop
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        self._poll()  # sending may have consumed the descriptor's only signal

    def _poll(self) -> None:
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._receive(frames)
        refusal = None if self._socket.closed else self._handshake.refusal()
        if refusal is not None:
            for pending in self._pending.values():
                if not pending.reply.done():
                    pending.reply.set_exception(AccessDenied(refusal))
        if self._handshake.successes > self._connections:
            new_server = self._connections > 0
            self._connections = self._handshake.successes
            if new_server:
                self._send_again()

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            for zmq_socket in (self._socket, self._handshake.monitor):
                self._loop.remove_reader(zmq_socket.fileno())
        self._loop = None

    def _abandon(self) -> None:
        self._socket.disable_monitor()
        self._socket.close(linger=0)


def _set_options(zmq_socket: zmq.Socket) -> None:
    zmq_socket.set(zmq.MAXMSGSIZE, max(LIMITS.header_bytes, LIMITS.parcel_bytes))
    zmq_socket.set(zmq.LINGER, LINGER_MS)
    zmq_socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    zmq_socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


def check_address(address: str, keys: Path | None = None) -> None:
    """Raises what a `Server` at `address` would, before there is anything to serve."""
    context, *_ = _bind(address, keys)
    context.destroy(linger=0)


def _bind(
    address: str, keys: Path | None
) -> tuple[zmq.Context, zmq.Socket, KeyAuthenticator | None]:
    refuse_open_or_served(address, keyed=keys is not None)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    _set_options(router)
    router.set(zmq.ROUTER_MANDATORY, 1)  # a reply to nobody is an error, not silence
    router.set(zmq.SNDHWM, REPLIES_QUEUED)
    router.set(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects takes its name over
    try:
        door = None if keys is None else KeyAuthenticator(context, router, keys)
        router.bind(address)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        code = error.errno or 0
        raise OSError(code, f"{address}: {zmq.strerror(code).lower()}") from error
    except ValueError:
        context.destroy(linger=0)
        raise
    return context, router, door


# ---- the twin within one loop


class LocalServer:
    """Serves a service to the `LocalClient`s of its asyncio loop.

    An exception of the service ends the server and is raised by every request from then on.
    """

    def __init__(self, service: RequestHandler, run_id: str, *, park_s: float = PARK_S) -> None:
        self.run_id = run_id
        self.clients: list[LocalClient] = []
        self._router = RequestRouter(
            service, run_id, park_s, connected=lambda client: client in self.clients
        )
        self._inbox: list[tuple[LocalClient, list[bytes]]] = []
        self._failure: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts the ticks; call it inside the loop."""
        self._tick()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def post(self, client: "LocalClient", frames: list[bytes]) -> None:
        """Takes a message; it is handled with all others of this turn of the loop."""
        if self._failure is not None:
            raise self._failure
        if not self._inbox:
            asyncio.get_running_loop().call_soon(self._work, False)
        self._inbox.append((client, frames))

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._work(True)

    def _work(self, tick: bool) -> None:
        now = asyncio.get_running_loop().time()
        inbox, self._inbox = self._inbox, []
        try:
            for client, frames in inbox:
                self._router.receive(client, frames, now)
            if tick:
                self._router.tick(now)
            replies = self._router.settle(now)
        except Exception as error:
            self._failure = error
            self.close()
            for client in self.clients:
                client.fail(error)
            return
        for client, frames in replies:
            client.deliver(frames)


class LocalClient(Client):
    """A client of a `LocalServer` in the same loop."""

    def __init__(self, server: LocalServer, sender: str, incarnation: int = 0) -> None:
        super().__init__("local", server.run_id, sender, incarnation)
        self._server = server
        server.clients.append(self)

    def deliver(self, frames: list[bytes]) -> None:
        """Takes a reply."""
        self._receive(frames)

    def fail(self, error: Exception) -> None:
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(error)

    def close(self) -> None:
        if self in self._server.clients:
            self._server.clients.remove(self)

    def _send(self, frames: list[bytes]) -> None:
        self._server.post(self, frames)

    def _poll(self) -> None:
        """Nothing can have come: replies are delivered, not fetched."""
