"""Presence of receivers: the learner holds a connection to each, which ends with the receiver.

    receiver   listens, keeps what connects, and sends a byte every BEAT_S, by a thread of its own
    learner    holds a connection to every member: the kernel ends it with the receiver's process,
               and within a few seconds of silence of its host or of the network
    roll call  receivers connect to each other once, as groups connect all members

A receiver that stands still is silent: its kernel keeps the connection, and no bytes come.
"""

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

BEAT_S = 0.5
LOOK_S = 0.1  # between two looks of a receiver at its connections
REACH_S = 1.5  # for a connection: enough for one lost packet, and half of a roll call
SILENT_S = 10.0  # without a beat while a version travels, as of a stopped process
BACKLOG = 1024  # of connections, all of which can come at once
KEEPALIVE = {  # four seconds until a host that is gone ends the connection
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 3,
}
Address = tuple[str, int]


class Member(msgspec.Struct, frozen=True):
    """Description of a receiver. `device`: identifier of its GPU; `host`, `port`: its presence."""

    name: str
    device: str
    host: str
    port: int


class Presence:
    """A receiver's end, from its construction until `closing` returns True or `close`."""

    def __init__(self, host: str, closing: Callable[[], bool]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._connected: list[socket.socket] = []
        self._closing = closing
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="presence", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _work(self) -> None:
        beat_at = 0.0
        while not (self._closed.wait(LOOK_S) or self._closing()):
            with contextlib.suppress(BlockingIOError):
                while True:
                    one, _ = self._listening.accept()
                    one.setblocking(False)
                    self._connected.append(one)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                self._connected = [one for one in self._connected if _beat(one)]
        for one in (self._listening, *self._connected):
            one.close()


def _beat(one: socket.socket) -> bool:
    """Send a beat; return False, with the socket closed, if the other end is gone."""
    try:
        if one.send(b".") and one.recv(1):
            return True
    except BlockingIOError:  # nothing to receive, or the learner stands still
        return True
    except OSError:
        pass
    one.close()
    return False


class Connections:
    """The learner's end: connections to receivers by their number."""

    def __init__(self) -> None:
        self._open: dict[int, socket.socket] = {}
        self._heard: dict[int, float] = {}

    def add(self, members: Mapping[int, Member]) -> dict[int, str]:
        """Connect to members; return the reasons of those that cannot be reached."""
        addresses = {number: (one.host, one.port) for number, one in members.items()}
        opened, failed = connect(addresses)
        for number, one in opened.items():
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                one.setsockopt(socket.IPPROTO_TCP, option, value)
            self._open[number], self._heard[number] = one, time.monotonic()
        return failed

    def drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._open:
                self._open.pop(number).close()

    def gone(self, numbers: Collection[int]) -> list[int]:
        """Return those that have ended or left."""
        return [number for number in numbers if not self._hear(number)]

    def silent(self, numbers: Collection[int], since: float) -> list[int]:
        """Return those without a beat for SILENT_S, all of it after the time `since`."""
        latest = time.monotonic() - SILENT_S
        return [one for one in numbers if max(since, self._heard.get(one, since)) < latest]

    def close(self) -> None:
        self.drop([*self._open])

    def _hear(self, number: int) -> bool:
        """Take in the beats of a receiver; return False if its connection has ended."""
        if number not in self._open:
            return False
        try:
            while self._open[number].recv(4096):
                self._heard[number] = time.monotonic()
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


def connect(addresses: Mapping[int, Address]) -> tuple[dict[int, socket.socket], dict[int, str]]:
    """Connect to all addresses at once; return the sockets, and the reasons where there is none."""
    opened, failed = dict[int, socket.socket](), dict.fromkeys(addresses, "timed out")
    with selectors.DefaultSelector() as selector:
        for number, (host, port) in addresses.items():
            one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            one.setblocking(False)
            if (code := one.connect_ex((host, port))) in (0, errno.EINPROGRESS):
                selector.register(one, selectors.EVENT_WRITE, (number, one))
            else:
                one.close()
                failed[number] = errno.errorcode[code]
        until = time.monotonic() + REACH_S
        while selector.get_map() and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                number, one = key.data
                selector.unregister(one)
                if code := one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    one.close()
                    failed[number] = errno.errorcode[code]
                else:
                    opened[number] = one
                    del failed[number]
        for key in selector.get_map().values():
            key.data[1].close()
    return opened, failed


def unreachable(addresses: Mapping[int, Address]) -> list[int]:
    """Return the numbers of the addresses to which this host cannot connect."""
    opened, failed = connect(addresses)
    for one in opened.values():
        one.close()
    return list(failed)


def apart(lacking: Mapping[int, Collection[int]]) -> list[int]:
    """Return the members to leave out so that all others reach each other.

    `lacking`: by member the others that it cannot reach. The one with the most such pairs goes
    first; of several the one with the highest number, which has joined last.
    """
    pairs = {frozenset((one, other)) for one, others in lacking.items() for other in others}
    pairs = {pair for pair in pairs if pair <= lacking.keys()}
    left_out = []
    while pairs:
        counts = {one: sum(one in pair for pair in pairs) for one in frozenset().union(*pairs)}
        worst = max(counts, key=lambda one: (counts[one], one))
        left_out.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return left_out
