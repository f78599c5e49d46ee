"""Promises of a weight channel to its two ends. Nothing here imports torch at run time."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from evolver_async.schema import WeightId

if TYPE_CHECKING:
    from torch import Tensor

    from evolver_async.weights.channel.weight_source import WeightSource

HEAD = "HEAD"  # the file of a channel's directory that names the newest version


class WeightsGone(LookupError):
    """Missing weights: replaced by newer ones, or never published."""


class WeightsCorrupt(ValueError):
    """Damaged weights; the message names file and tensor."""


class Publisher(Protocol):
    """The learner's end."""

    address: str

    def publish(
        self, weights: WeightId, tensors: dict[str, Tensor] | WeightSource, retain: bool = False
    ) -> None:
        """Make `tensors` the head. Blocks no longer than copying them takes; the caller may change
        them after `copied`. `retain` keeps them until `release`, however many newer ones come."""
        ...

    def heed(
        self,
        stops: Callable[[], bool],
        tell: Callable[[str], object],
        warn: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Set the test that ends a wait for disk space, and the call that reports it
        (`room.await_room`).

        `warn` is called, in another thread, for actors that get no weights.
        """
        ...

    def copied(self) -> None:
        """Return once every published tensor may be changed."""
        ...

    def wait(self) -> None:
        """Return once every published version is visible to receivers."""
        ...

    def release(self, weights: WeightId) -> None:
        """Stop retaining these weights."""
        ...

    def close(self) -> None:
        """Remove everything published."""
        ...


class Receiver(Protocol):
    """An actor's end."""

    def head(self) -> WeightId | None:
        """The weights published last, None before the first; cheap."""
        ...

    def available(self) -> list[WeightId]:
        """Everything that can be fetched now, oldest first."""
        ...

    def fetch(self, weights: WeightId) -> dict[str, Tensor]:
        """The verified tensors. Raises WeightsGone or WeightsCorrupt.

        They never change, and the caller keeps them as long as it likes; it does not change them.
        """
        ...

    def close(self) -> None: ...


def read_head(directory: Path) -> WeightId | None:
    """Read the newest version from a channel's directory."""
    path = directory / HEAD
    try:
        try:
            text = path.read_text()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            text = path.read_text()  # another host had replaced the file since it was opened
    except FileNotFoundError:
        return None
    lineage, step = text.split(".")
    return WeightId(lineage=int(lineage), step=int(step))


def listen(host: str, port: int, key: str = "weights.address") -> socket.socket:
    """Open the socket of an address. Raises OSError, whose text names its key."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        text = f"{key}: {host}, port {port}: {error.strerror}"
        raise OSError(error.errno, text) from None
