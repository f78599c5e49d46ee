"""Server over ZeroMQ, and the rules that both ends of the transport follow.

    client (DEALER)                         server (ROUTER), one thread, and one for the sync
    request ──send, resend until a reply──▶ receive all waiting → service.handle each
                                            → parked requests again → service.write() once
                                            → sync in the other thread; receive and handle meanwhile
    reply   ◀────────────────────────────── send, only now; then write what came meanwhile

All state changes in one thread, in the order in which messages came. At most one commit is under
way, and no more is received than the next one may hold.

Nothing is lost: `router` gives out a reply only after the commit of its contents, and `client`
sends the same message id again until a reply comes. `in_process` does the same within one asyncio
loop, without sockets.
"""

import logging
import math
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import zmq

from evolver_async.errors import Inconsistency
from evolver_async.wire.addresses import refuse_open_or_served
from evolver_async.wire.curve import KeyAuthenticator
from evolver_async.wire.envelope import Envelope, pack
from evolver_async.wire.messages import Ok
from evolver_async.wire.router import (
    PARK_S,
    SILENT_S,
    TICK_S,
    RequestHandler,
    RequestRouter,
    SyncsApart,
)
from evolver_async.wire.sockets import LINGER_MS, REPLIES_QUEUED, receive, send, set_options

BATCH_MESSAGES = 512
BATCH_BYTES = 64 << 20
BATCH_S = 0.02  # the longest that replies wait while messages are received
GATHER_S = (
    0.005  # between the beginnings of two commits with a sync: more syncs cost more than wait
)

JOIN_S = 60.0  # a sync that lasts longer is left alone at the end

log = logging.getLogger(__name__)


@dataclass
class _Gathered:
    """Messages that were handled since the last commit began, and their bytes."""

    messages: int = 0
    size: int = 0

    def full(self) -> bool:
        return self.messages >= BATCH_MESSAGES or self.size >= BATCH_BYTES


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
        apart = isinstance(service, SyncsApart)
        self._write = service.write if apart else service.commit
        self._gather_s = GATHER_S if apart else 0.0
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
        with SyncThread() as sync:
            self._sync, self._replies = sync, []
            self._poller.register(sync.fileno(), zmq.POLLIN)
            try:
                self._serve(stopped)
            finally:
                self._poller.unregister(sync.fileno())

    def _serve(self, stopped: Callable[[], bool]) -> None:
        sync = self._sync
        next_tick = next_commit = self._clock()
        gathered = _Gathered()
        while not stopped():
            if sync.busy:  # no request is answered, so no time passes for the service
                due = self._clock() + TICK_S
            else:
                due = min(next_tick, next_commit) if gathered.messages else next_tick
            self._wait(due, gathered)
            now = self._clock()
            if sync.returned and sync.busy:
                self._finish()
            self._receive(now, gathered)
            if sync.busy:
                continue
            ticks = now >= next_tick
            if ticks:
                self._router.tick(now)
                next_tick = now + TICK_S
            if ticks or (gathered.messages and now >= next_commit):
                self._begin(now)
                gathered = _Gathered()
                next_commit = now + self._gather_s
        if sync.busy:
            sync.wait(None)
            self._finish()
        self._begin(self._clock())
        if sync.busy:
            sync.wait(None)
            self._finish()

    def _wait(self, due: float, gathered: "_Gathered") -> None:
        """Wait until something comes, at most until `due`; for the disk alone if too much came."""
        left_s = max(0.0, due - self._clock())
        if gathered.full():
            self._sync.wait(left_s)
        else:
            self._poller.poll(math.ceil(1000 * left_s))
        if self._authenticator is not None:
            self._authenticator.answer()

    def _begin(self, now: float) -> None:
        """Begin a commit of all that was handled; reply if it needs no sync."""
        call, self._replies = self._router.begin(now, self._write)
        if call is not None:
            self._sync.start(call)
        else:
            self._reply()

    def _finish(self) -> None:
        """End a commit that was synced, and reply."""
        self._sync.finish()
        self._reply()

    def _reply(self) -> None:
        for identity, frames in self._replies:
            self._send(identity, frames)
        self._replies = []

    def close(self) -> None:
        """Send the remaining replies for at most a second; free the address."""
        self._socket.close(linger=LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.socket.close(linger=0)
        self._context.term()  # waits for the socket file to be gone, which close alone does not

    def _receive(self, now: float, gathered: "_Gathered") -> None:
        """Handle the waiting messages, up to a bound, until a sync has returned."""
        while not gathered.full():
            try:
                identity, *frames = receive(self._socket)
            except zmq.Again:
                return
            self._router.receive(bytes(identity), frames, now)
            gathered.messages += 1
            gathered.size += sum(map(len, frames))
            if self._clock() - now >= BATCH_S or (self._sync.busy and self._sync.returned):
                return

    def _connected(self, identity: bytes) -> bool:
        """True if a client is connected: a reply to no request, which it ignores, can be sent."""
        try:
            self._socket.send_multipart([identity, *self._probe], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno != zmq.EHOSTUNREACH
        return True

    def _send(self, identity: Any, frames: list[bytes]) -> None:
        try:
            send(self._socket, [identity, *frames])
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
    set_options(router, address)
    router.set(zmq.ROUTER_MANDATORY, 1)  # a reply to a missing client is an error
    router.set(zmq.SNDHWM, REPLIES_QUEUED)
    router.set(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects takes its name over
    try:
        authenticator = None if keys is None else KeyAuthenticator(context, router, keys)
        router.bind(address)
    except (zmq.ZMQError, ValueError) as error:
        context.destroy(linger=0)
        if isinstance(error, ValueError):
            raise
        code = error.errno or 0
        raise OSError(code, f"{address}: {zmq.strerror(code).lower()}") from error
    return context, router, authenticator


class SyncThread:
    """Thread that syncs a commit while the server receives the next one: one call at a time.

    `fileno` is readable once a call has returned, until `finish`."""

    def __init__(self) -> None:
        self.busy = False  # from `start` to `finish`
        self.returned = False
        self._error: BaseException | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=self._run, name="sync", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._calls.put(None)
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            os.close(self._reading)
            os.close(self._writing)

    def fileno(self) -> int:
        return self._reading

    def start(self, call: Callable[[], None]) -> None:
        if self.busy:
            raise Inconsistency("one sync at a time")
        self.busy, self.returned = True, False
        self._calls.put(call)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until the call has returned, or for so long."""
        select.select([self._reading], [], [], timeout_s)

    def finish(self) -> None:
        """End a call that has returned. Raises its error."""
        os.read(self._reading, 1)
        self.busy = False
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:
                self._error = error
            self.returned = True
            os.write(self._writing, b"\0")
