"""Encrypted sockets: CurveZMQ at both ends, and an authenticator that admits only listed keys.

    client  knows server.public, has client.secret ─▶ server proves server.secret
    server  asks the authenticator (ZAP, RFC 27)   ─▶ is the client's key in allowed/?

CURVE alone admits every client that knows the server's public key. The list is read at every
handshake, so a copied file admits a client and a deleted one excludes it from its next connection
on. `keys` reads and writes the files.
"""

import logging
import time
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from evolver_async.wire.keys import (
    ALLOWED,
    KeysError,
    client_keys,
    listed,
    read_key,
    server_secret,
)

ZAP_ADDRESS = "inproc://zeromq.zap.01"  # fixed by libzmq, within the context of the socket
ZAP_DOMAIN = b"evolver-async"
UNCLEAR_S = 3.0  # a server that restarts behind a proxy cuts handshakes as well
UNCLEAR_FAILURES = 5
EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)

log = logging.getLogger(__name__)


class KeyAuthenticator:
    """The server's end. The server's loop polls `socket` and calls `answer`."""

    def __init__(self, context: zmq.Context, router: zmq.Socket, keys: Path) -> None:
        self._keys = keys
        router.set(zmq.CURVE_SECRETKEY, server_secret(keys))
        router.set(zmq.CURVE_SERVER, 1)
        router.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self.socket = context.socket(zmq.REP)
        self.socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """Admit or refuse every waiting client."""
        while True:
            try:
                version, request, _, address, _, mechanism, *credentials = (
                    self.socket.recv_multipart(zmq.NOBLOCK)
                )
            except zmq.Again:
                return
            name = self._name(mechanism, credentials)
            if name is None:
                log.warning("refused %s: its key is not listed", address.decode(errors="replace"))
            code, text = (b"400", b"not listed") if name is None else (b"200", b"")
            reply = [version, request, code, text, (name or "").encode(), b""]
            self.socket.send_multipart(reply, zmq.NOBLOCK)

    def _name(self, mechanism: bytes, credentials: list[bytes]) -> str | None:
        """The name of the listed client with this key, None if there is none."""
        if mechanism != b"CURVE" or len(credentials) != 1:
            return None
        wanted = z85.encode(credentials[0])
        for path in listed(self._keys):
            try:
                if read_key(path) == wanted:
                    return path.stem
            except KeysError as error:
                log.error("%s", error)
        return None


class Handshake:
    """The client's end. libzmq reports the cause of a failed connection only to a monitor."""

    def __init__(self, dealer: zmq.Socket, address: str, keys: Path | None) -> None:
        self._address = address
        self._keys = keys
        self.successes = 0  # established connections
        self.connected = False
        self._refusal: str | None = None
        self._unclear: list[float] = []
        if keys is not None:
            own = client_keys(keys)
            dealer.set(zmq.CURVE_SERVERKEY, own.server)
            dealer.set(zmq.CURVE_PUBLICKEY, own.public)
            dealer.set(zmq.CURVE_SECRETKEY, own.secret)
        self.monitor = dealer.get_monitor_socket(EVENTS)

    def refusal(self) -> str | None:
        """Reason why the server will never admit this client, None if none is known."""
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return self._refusal
            self._note_event(event, time.monotonic())

    def _note_event(self, event: int, now: float) -> None:
        """Note an event. After the two failures with a detail libzmq does not reconnect."""
        keys = self._keys
        self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if event == zmq.EVENT_DISCONNECTED:
            return
        if self.connected:
            self.successes += 1
            self._refusal = None  # one that was guessed is refuted
            self._unclear.clear()
            return
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            cause = f"the key {keys}/client.secret is not listed there ({ALLOWED}/NAME.public)"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            cause = f"the server has no keys, this client has those of {keys}"
            if keys is None:
                cause = "only clients with keys are let in (security.keys, or --keys DIR)"
        elif self.successes:  # it is the right server, which is away behind a proxy
            return
        else:
            self._unclear.append(now)
            if len(self._unclear) <= UNCLEAR_FAILURES or now - self._unclear[0] <= UNCLEAR_S:
                return
            # libzmq may cut a connection of a server without keys before it says why
            key = f"{keys}/server.public"
            cause = f"the server's key is not {key}, the server has no keys, or it is no buffer"
            if keys is None:
                cause = "the connection is cut at once; perhaps it is no buffer"
            self._unclear.clear()
        self._refusal = f"{self._address}: {cause}"
