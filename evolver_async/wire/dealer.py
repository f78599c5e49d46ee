"""Client over ZeroMQ."""

import asyncio
import contextlib
from pathlib import Path

import zmq

from evolver_async.wire.addresses import from_here
from evolver_async.wire.client import RESEND_S, AccessDenied, Client
from evolver_async.wire.curve import Handshake
from evolver_async.wire.names import NameLookup, require_place
from evolver_async.wire.router import PARK_S
from evolver_async.wire.sockets import LINGER_MS, REPLIES_QUEUED, send, set_options

UNCONNECTED = "no connection; nothing listens there yet, or a firewall closes the port"


class DealerClient(Client):
    """Client over ZeroMQ, for one asyncio loop at a time; the loop may pause in between.

    Replies are read in the loop's own file-descriptor callback and once more at every send and
    every timeout, so none depends on a task that runs in the background. With `keys` the connection
    is encrypted; where the server does not let this client in, every request raises
    AccessDenied.
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
        self._lookup = NameLookup(from_here(address))
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        set_options(self._socket, address)
        self._socket.set(zmq.RCVHWM, REPLIES_QUEUED)
        # The same after a reconnect, so that a parked request's reply still finds its way; with the
        # nonce, since a second process of this name would take the connection over.
        self._socket.set(zmq.ROUTING_ID, f"{self.nonce}/{sender}/{incarnation}".encode()[:255])
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            require_place(address)
            self._handshake = Handshake(self._socket, address, keys)
            self._socket.connect(from_here(address))
        except (zmq.ZMQError, ValueError) as error:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
            if isinstance(error, ValueError):
                raise
            cause = zmq.strerror(error.errno or 0).lower()
            raise ValueError(f"{address}: no address to connect to ({cause})") from None

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
            send(self._socket, frames)
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
            self.fail(AccessDenied(refusal))
        if self._handshake.successes > self._connections:
            new_server = self._connections > 0
            self._connections = self._handshake.successes
            # the former one will never answer
            for message_id, pending in list(self._pending.items()) if new_server else ():
                if not pending.reply.done():
                    self._transmit(message_id, pending)

    def _connected(self) -> bool:
        return self._handshake.connected

    def _obstacle(self) -> str:
        if self._connected():
            return ""
        problem = self._lookup.problem
        self._lookup.start()  # for the next line; what it finds may take seconds
        return f": {problem or UNCONNECTED}"

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            for zmq_socket in (self._socket, self._handshake.monitor):
                self._loop.remove_reader(zmq_socket.fileno())
        self._loop = None
