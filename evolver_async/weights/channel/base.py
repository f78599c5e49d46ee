"""Promises of a weight channel to its two ends. Nothing here imports torch at run time."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from evolver_async.schema import WeightId

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "HEAD"  # the file of a channel's directory that names the newest version


class WeightsGone(LookupError):
    """These weights are not there: replaced by newer ones, or never published."""


class WeightsCorrupt(ValueError):
    """What was read is not what was published; the message names file and tensor."""


class Publisher(Protocol):
    """The learner's end."""

    address: str

    def publish(self, weights: WeightId, tensors: dict[str, Tensor], retain: bool = False) -> None:
        """Make `tensors` the head. Blocks no longer than copying them takes; the caller may then
        change them. `retain` keeps them until `release`, however many newer ones come."""
        ...

    def wait(self) -> None:
        """Return once everything published is visible to receivers."""
        ...

    def release(self, weights: WeightId) -> None:
        """Retained weights are no longer needed."""
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
        """The verified tensors. Raises WeightsGone or WeightsCorrupt."""
        ...

    def close(self) -> None: ...


def read_head(directory: Path) -> WeightId | None:
    """The version that a channel's directory names as its newest."""
    try:
        lineage, step = (directory / HEAD).read_text().split(".")
    except FileNotFoundError:
        return None
    return WeightId(lineage=int(lineage), step=int(step))


def listen(host: str, port: int) -> socket.socket:
    """A socket for `weights.address`; OSError, whose text names the key, where there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        text = f"weights.address: {host}, port {port}: {error.strerror}"
        raise OSError(error.errno, text) from None
