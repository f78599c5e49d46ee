"""Rendezvous of sender and receivers: a key-value store at the learner, and a log of events in it.

    numbers            count of the numbers that receivers took, from 1
    member/N           description of number N: with this it has joined
    event/K            the sender's log, read by every receiver in order (see `sender`)
    tail               events written so far
    here/R/N, ack/I/N  a receiver's answers to roll call R (numbers of those that it cannot reach)
                       and to cast I (OK, or why it has not received it)
    epoch/E/           rendezvous of the members of epoch E
    requests           queue of versions that receivers ask for, as JSON

Answers and rendezvous are deleted when the next epoch begins, a description when it was read: a
store lives as long as its learner, in its memory.

The store has no locks and no passwords: every process that reaches its port can read and change it.
Without an address of its own it is on this host's loopback interface at a free port, and keys have
a random prefix; both are in a file of a private directory.
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

from evolver_async.config.sections.weight_channel import host_and_port
from evolver_async.weights.channel.interface import listen

FILE = "RENDEZVOUS"
LOOPBACK = "127.0.0.1"
PROBE_S = 2.0  # for a connection to be accepted
POLL_S = 0.01
OK = "ok"  # a receiver's answer to a cast
REQUESTS = "requests"
KEPT_EVENTS = 1000  # a receiver further behind joins anew


class StoreAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address of a store and the prefix of its keys."""

    host: str
    port: int
    prefix: str


class ServedStore:
    """The learner's store. `host`: the interface for both directions."""

    def __init__(self, address: str, timeout_s: float) -> None:
        found = _address_of(address) or StoreAddress(LOOPBACK, 0, secrets.token_hex(16))
        self.host = found.host
        self._file = None if address.startswith("tcp://") else Path(address) / FILE
        listening = listen(found.host, found.port)
        port = listening.getsockname()[1]
        self._server = TCPStore(
            found.host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listening.detach(),
        )
        self._prefix = found.prefix
        self.store: Store = PrefixStore(found.prefix, self._server)
        if self._file is not None:
            part = self._file.with_name(f".{FILE}")
            part.touch(mode=0o600)
            part.write_bytes(msgspec.json.encode(StoreAddress(found.host, port, found.prefix)))
            part.replace(self._file)

    def forget(self, *folders: str) -> None:
        """Delete all keys in these folders."""
        within = tuple(f"{self._prefix}/{folder}/" for folder in folders)
        for key in self._server.list_keys():
            if key.startswith(within):
                self._server.delete_key(key)

    def close(self) -> None:
        """Withdraw the address; the store itself ends with this object."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def connect(address: str, timeout_s: float) -> tuple[Store, str]:
    """Connect a receiver to the store at `address`; return it and the interface of this host.

    Raises OSError if no store is there.
    """
    found = _address_of(address) or msgspec.json.decode(
        (Path(address) / FILE).read_bytes(), type=StoreAddress
    )
    with socket.create_connection((found.host, found.port), timeout=PROBE_S) as probe:
        own = probe.getsockname()[0]
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(found.host, found.port, is_master=False, timeout=timeout)
    return PrefixStore(found.prefix, store), own


def _address_of(address: str) -> StoreAddress | None:
    if not address.startswith("tcp://"):
        return None
    return StoreAddress(*host_and_port(address), "weights")


class EventLog:
    """The sender's end of the events."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tail = 0
        store.set("tail", "0")

    def write(self, event: dict[str, Any]) -> None:
        # The event before the tail: a reader takes an event below the tail that is missing for a
        # deleted one.
        self._store.set(f"event/{self._tail}", json.dumps(event))
        self._tail += 1
        self._store.set("tail", str(self._tail))
        if self._tail > KEPT_EVENTS:
            self._store.delete_key(f"event/{self._tail - KEPT_EVENTS}")


class EventReader:
    """A receiver's end: every event since its construction."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next = int(store.get("tail"))

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """Return the next event, None if none comes in time."""
        event = self.peek(seconds)
        self._next += event is not None
        return event

    def peek(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """Return the next event without consuming it, None if none comes in time.

        Raises ConnectionError if it was deleted, RuntimeError if the learner is gone.
        """
        name, until = f"event/{self._next}", time.monotonic() + seconds
        while not self._store.check([name]):
            # The store's own wait prints to stderr whenever nothing comes.
            if time.monotonic() < until:
                time.sleep(POLL_S)
                continue
            if int(self._store.get("tail")) > self._next and not self._store.check([name]):
                raise ConnectionError("fell behind the events of the weight channel")
            return None
        return json.loads(self._store.get(name))
