"""How requests and replies travel: over ZeroMQ, or within one asyncio loop.

    client (DEALER)                         server (ROUTER), one thread
    request ──send, resend until a reply──▶ receive all that waits → service.handle each
                                            → parked requests again → service.commit() once
    reply   ◀────────────────────────────── send, only now

The rules, and why nothing is lost or deadlocks, are in `delivery.py`. `LocalServer` and
`LocalClient` are the twin for serial runs: same bytes, same rules, the loop's clock (which may be
virtual), no sockets and no threads. No other file knows ZeroMQ.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from evolver_async.delivery import PARK_S, RESEND_S, Client, Desk, Rejected, Service
from evolver_async.wire import LIMITS, Buffer

__all__ = [
    "Client",
    "DealerClient",
    "LocalClient",
    "LocalServer",
    "Rejected",
    "Server",
    "Service",
    "check_address",
]

TICK_S = 0.1
BATCH_MESSAGES = 512
BATCH_BYTES = 64 << 20
REPLIES_QUEUED = 100_000  # per client; past it replies are dropped and asked for again
LINGER_MS = 1000
HEARTBEAT_MS = 2000
HEARTBEAT_TIMEOUT_MS = 10_000
IPC_PATH_BYTES = 107  # of the kernel's socket address

log = logging.getLogger(__name__)


# ---- sockets


class Server:
    """Serves one service at one address; run `serve` in one thread.

    Raises ValueError where the address would be open to others, OSError where it is in use.
    """

    def __init__(
        self,
        service: Service,
        address: str,
        run_id: str,
        *,
        park_s: float = PARK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk = Desk(service, run_id, park_s)
        self._clock = clock
        self._context, self._socket = _bind(address)
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)

    def serve(self, stop: threading.Event | Callable[[], bool]) -> None:
        """Receives, handles, commits and replies until `stop`; checked at least every 100 ms."""
        stopped = stop.is_set if isinstance(stop, threading.Event) else stop
        next_tick = self._clock()
        while not stopped():
            self._socket.poll(max(0, round(1000 * (next_tick - self._clock()))))
            now = self._clock()
            received = self._receive_batch(now)
            if now >= next_tick:
                self._desk.tick(now)
                next_tick = now + TICK_S
            elif not received:
                continue
            for identity, frames in self._desk.settle(now):
                self._send(identity, frames)

    def close(self) -> None:
        """Sends what is left for at most a second; the address is free afterwards."""
        self._socket.close(linger=LINGER_MS)
        self._context.term()  # waits for the socket file to be gone, which close alone does not

    def _receive_batch(self, now: float) -> int:
        """Handles all messages that wait, up to a bound; the number of them."""
        size = 0
        for received in range(BATCH_MESSAGES):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return received
            self._desk.receive(identity, frames, now)
            size += sum(map(len, frames))
            if size >= BATCH_BYTES:
                return received + 1
        return BATCH_MESSAGES

    def _send(self, identity: bytes, frames: list[Buffer]) -> None:
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.debug("no reply to %r: %s", identity, error.strerror)


class DealerClient(Client):
    """A client over ZeroMQ, for one asyncio loop at a time; the loop may stand still in between.

    Replies are read in the loop's own file-descriptor callback and once more at every send and
    every timeout, so none depends on a task that runs in the background.
    """

    def __init__(
        self,
        address: str,
        run_id: str = "",
        sender: str = "",
        incarnation: int = 0,
        *,
        park_s: float = PARK_S,
        resend_s: float = RESEND_S,
    ) -> None:
        super().__init__(address, run_id, sender, incarnation, park_s=park_s, resend_s=resend_s)
        if not sender:
            raise ValueError("sender: every client needs a name of its own")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        _set_options(self._socket)
        self._socket.set(zmq.RCVHWM, REPLIES_QUEUED)
        # the same name after a reconnect, so that a parked request's reply still finds its way
        self._socket.set(zmq.ROUTING_ID, f"{sender}/{incarnation}".encode()[:255])
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            said = zmq.strerror(error.errno or 0).lower()
            raise ValueError(f"{address}: no address to connect to ({said})") from None

    def close(self) -> None:
        self._detach()
        self._socket.close(linger=LINGER_MS)

    def _send(self, frames: list[Buffer]) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._detach()
            loop.add_reader(self._socket.get(zmq.FD), self._poll)
            self._loop = loop
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        self._poll()  # sending may have consumed the descriptor's only signal

    def _poll(self) -> None:
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frames)

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.get(zmq.FD))
        self._loop = None


def _set_options(zmq_socket: zmq.Socket) -> None:
    zmq_socket.set(zmq.MAXMSGSIZE, max(LIMITS.array_bytes, LIMITS.group_header_bytes))
    zmq_socket.set(zmq.LINGER, LINGER_MS)
    zmq_socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    zmq_socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


def check_address(address: str) -> None:
    """Raises what a `Server` at `address` would, before there is anything to serve."""
    context, _ = _bind(address)
    context.destroy(linger=0)


def _bind(address: str) -> tuple[zmq.Context, zmq.Socket]:
    _refuse_open_or_served(address)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    _set_options(router)
    router.set(zmq.ROUTER_MANDATORY, 1)  # a reply to nobody is an error, not silence
    router.set(zmq.SNDHWM, REPLIES_QUEUED)
    router.set(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects takes its name over
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        code = error.errno or 0
        raise OSError(code, f"{address}: {zmq.strerror(code).lower()}") from error
    return context, router


def _refuse_open_or_served(address: str) -> None:
    scheme, _, place = address.partition("://")
    if scheme == "tcp":
        host = place.rpartition(":")[0].strip("[]")
        with contextlib.suppress(ValueError):
            if host == "localhost" or ipaddress.ip_address(host).is_loopback:
                return
        raise ValueError(
            f"buffer.address: {address} can be reached from other hosts; use a loopback address"
        )
    if scheme != "ipc" or not place.startswith("/"):
        raise ValueError(f"buffer.address: {address} is neither ipc:///path nor tcp://host:port")
    path = Path(place)
    if len(os.fsencode(path)) > IPC_PATH_BYTES:
        raise ValueError(f"buffer.address: {address} is longer than {IPC_PATH_BYTES} bytes")
    if not path.parent.is_dir():
        raise ValueError(f"buffer.address: {path.parent} is not a directory")
    if stat.S_IMODE(path.parent.stat().st_mode) & 0o077:
        raise ValueError(f"buffer.address: the directory {path.parent} must have mode 0700")
    if not path.exists():
        return
    if not path.is_socket():
        raise OSError(errno.EEXIST, f"{address}: the file is not a socket")
    # libzmq replaces an existing socket file without asking, so ask whether somebody serves it
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(place)
        except ConnectionRefusedError:
            return
        except TimeoutError:
            pass  # somebody listens, with a full backlog
    raise OSError(errno.EADDRINUSE, f"{address}: address already in use")


# ---- the twin within one loop


class LocalServer:
    """Serves a service to the `LocalClient`s of its asyncio loop.

    An exception of the service ends the server and is raised by every request from then on.
    """

    def __init__(self, service: Service, run_id: str, *, park_s: float = PARK_S) -> None:
        self.run_id = run_id
        self.clients: list[LocalClient] = []
        self._desk = Desk(service, run_id, park_s)
        self._inbox: list[tuple[LocalClient, list[Buffer]]] = []
        self._failure: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts the ticks; call it inside the loop."""
        self._tick()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def post(self, client: "LocalClient", frames: list[Buffer]) -> None:
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
                self._desk.receive(client, frames, now)
            if tick:
                self._desk.tick(now)
            replies = self._desk.settle(now)
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

    def deliver(self, frames: list[Buffer]) -> None:
        """Takes a reply; copied, as a socket would, so that nobody shares arrays."""
        self._receive([bytes(frame) for frame in frames])

    def fail(self, error: Exception) -> None:
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(error)

    def close(self) -> None:
        if self in self._server.clients:
            self._server.clients.remove(self)

    def _send(self, frames: list[Buffer]) -> None:
        self._server.post(self, [bytes(frame) for frame in frames])

    def _poll(self) -> None:
        """Nothing can have come: replies are delivered, not fetched."""
