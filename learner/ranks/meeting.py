"""Meeting places of the ranks of a learner: a private file of one host, or an address.

The first rank keeps the store at an address. It ends with that process, so that ranks which start
again can meet the next first rank alone.
"""

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from evolver_async.config.sections.weight_channel import host_and_port

POLL_S = 0.5

log = logging.getLogger(__name__)


class Meeting(Protocol):
    """A place where ranks meet."""

    def store(self, rank: int, count: int, deadline: timedelta) -> Store:
        """Return the store that all ranks share; its calls have the deadline."""
        ...

    def assemble(self, store: Store, rank: int, count: int, deadline: timedelta) -> None:
        """Wait for all ranks, on the first one. RuntimeError if some do not come in time."""

    def interface(self) -> str:
        """Return the name of the network interface by which ranks reach each other."""
        ...


@dataclass(frozen=True)
class FileMeeting:
    """Ranks of one host, which meet at a file that the launcher chose, in a private directory."""

    path: Path

    def store(self, rank: int, count: int, deadline: timedelta) -> Store:
        store = dist.FileStore(str(self.path), count)  # pyright: ignore[reportPrivateImportUsage]
        store.set_timeout(deadline)
        return store

    def assemble(self, store: Store, rank: int, count: int, deadline: timedelta) -> None:
        """Do nothing: the launcher has started all of them."""

    def interface(self) -> str:
        return _interface_of("127.0.0.1")


@dataclass(frozen=True)
class AddressMeeting:
    """Ranks of several hosts. `tell`: told, by the first rank, which ranks have not come."""

    address: str
    tell: Callable[[list[int]], None] = lambda missing: None

    def store(self, rank: int, count: int, deadline: timedelta) -> Store:
        host, port = host_and_port(self.address)
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host, port, is_master=rank == 0, timeout=deadline, wait_for_workers=False
        )

    def assemble(self, store: Store, rank: int, count: int, deadline: timedelta) -> None:
        """As `Meeting.assemble`. RuntimeError also on a rank that has been here before: the first
        one is still that of ranks which have ended."""
        if store.add(_name(rank), 1) > 1:
            raise RuntimeError(f"rank {rank} has met the ranks at {self.address} before")
        if rank == 0:
            self._wait(store, count, time.monotonic() + deadline.total_seconds())

    def interface(self) -> str:
        host, port = host_and_port(self.address)
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as towards:  # sends nothing
            towards.connect(place)
            return _interface_of(towards.getsockname()[0])

    def _wait(self, store: Store, count: int, until: float) -> None:
        told: list[int] = []
        while missing := [rank for rank in range(count) if not store.check([_name(rank)])]:
            if time.monotonic() > until:
                raise RuntimeError(f"ranks {missing} have not come to {self.address}")
            if missing != told:
                log.info("ranks %s have not come to %s yet", missing, self.address)
                self.tell(missing)
                told = missing
            time.sleep(POLL_S)


def _name(rank: int) -> str:
    return f"come/{rank}"


def _interface_of(address: str) -> str:
    """Return the name of the network interface that has an address."""
    return next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.address.partition("%")[0] == address for one in addresses)
    )
