"""Where the ends of a collective meet: a key-value store at the learner, and what is kept in it.

    numbers            how many receivers took a number, from 1
    member/N           who number N is: with this it has joined
    event/K            the publisher's log, read by every receiver in order (see `collective`)
    tail               events written so far
    here/R/N, ack/I/N  a receiver's answers to roll call R and to cast I
    epoch/E/           where the members of epoch E find each other

The store has no locks and no passwords: whoever reaches its port can read and change it. Without an
address of its own it is on this host's loopback interface at a free port, and keys have a random
prefix; both are in a file of a private directory.
"""

import json
import secrets
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from evolver_async.weights.channel.base import listen

FILE = "RENDEZVOUS"
LOOPBACK = "127.0.0.1"
PROBE_S = 2.0  # for a connection to be accepted
POLL_S = 0.01
KEPT_EVENTS = 1000  # who falls further behind joins anew


class StoreAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A store: where it is and under which prefix its keys are."""

    host: str
    port: int
    prefix: str


class ServedStore:
    """The learner's store. `host` is how receivers reach it and how it reaches them."""

    def __init__(self, address: str, timeout_s: float) -> None:
        place = _place_of(address) or StoreAddress(LOOPBACK, 0, secrets.token_hex(16))
        self.host = place.host
        self._file = None if address.startswith("tcp://") else Path(address) / FILE
        listening = listen(place.host, place.port)
        port = listening.getsockname()[1]
        self._server = TCPStore(
            place.host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listening.detach(),
        )
        self.store: Store = PrefixStore(place.prefix, self._server)
        if self._file is not None:
            part = self._file.with_name(f".{FILE}")
            part.touch(mode=0o600)
            part.write_bytes(msgspec.json.encode(StoreAddress(place.host, port, place.prefix)))
            part.replace(self._file)

    def close(self) -> None:
        """Withdraw the address; the store itself ends with this object."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def connect(address: str, timeout_s: float) -> tuple[Store, str]:
    """A receiver's connection to the store at `address`, and the interface of this host it uses.

    OSError where nobody serves it now.
    """
    place = _place_of(address) or msgspec.json.decode(
        (Path(address) / FILE).read_bytes(), type=StoreAddress
    )
    with socket.create_connection((place.host, place.port), timeout=PROBE_S) as probe:
        own = probe.getsockname()[0]
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(place.host, place.port, is_master=False, timeout=timeout)
    return PrefixStore(place.prefix, store), own


def _place_of(address: str) -> StoreAddress | None:
    if not address.startswith("tcp://"):
        return None
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return StoreAddress(host.strip("[]"), int(port), "weights")


class EventLog:
    """The publisher's end of the events."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tail = 0
        store.set("tail", "0")

    def write(self, event: dict[str, Any]) -> None:
        self._store.set(f"event/{self._tail}", json.dumps(event))
        self._tail += 1
        self._store.set("tail", str(self._tail))
        if self._tail > KEPT_EVENTS:
            self._store.delete_key(f"event/{self._tail - KEPT_EVENTS}")


class EventReader:
    """A receiver's end: every event from the moment it was made."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next = int(store.get("tail"))

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """The next event; None where none comes in time."""
        event = self.peek(seconds)
        self._next += event is not None
        return event

    def peek(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """The same, which stays the next. ConnectionError where it was deleted long ago.

        RuntimeError where the learner is gone.
        """
        name, until = f"event/{self._next}", time.monotonic() + seconds
        while not self._store.check([name]):
            # The store could wait itself, but says so on stderr every time that nothing comes.
            if time.monotonic() < until:
                time.sleep(POLL_S)
                continue
            if int(self._store.get("tail")) > self._next and not self._store.check([name]):
                raise ConnectionError("fell behind the events of the weight channel")
            return None
        return json.loads(self._store.get(name))
