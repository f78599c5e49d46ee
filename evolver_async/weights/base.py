"""What a weight channel promises its two ends, and the private directories that channels live in.

Nothing here imports torch at run time, so that a launcher can claim and sweep directories.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil

from evolver_async.schema import WeightId

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "evolver-"
OWNER = "owner.json"
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


def claim(directory: Path) -> None:
    """Make `directory` for this process and its user alone; a living owner keeps it.

    Raises PermissionError where somebody else could write to it.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise PermissionError(f"{directory}: must be private to this user (mode 0700)")
    if owned(directory):
        return
    me = psutil.Process()
    part = directory / f".{OWNER}.{me.pid}"
    part.write_text(json.dumps({"pid": me.pid, "created": me.create_time()}))
    part.replace(directory / OWNER)


def sweep(parent: Path) -> None:
    """Remove this user's channel directories in `parent` whose owner has ended."""
    for directory in parent.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # another process sweeps as well
            mine = directory.lstat().st_uid == os.getuid()
            if mine and (directory / OWNER).exists() and not owned(directory):
                shutil.rmtree(directory, ignore_errors=True)


def owned(directory: Path) -> bool:
    """Whether the very process that claimed it, not another one given its number, still runs."""
    try:
        owner = json.loads((directory / OWNER).read_text())
        return abs(psutil.Process(owner["pid"]).create_time() - owner["created"]) < 1.0
    except (FileNotFoundError, psutil.Error):
        return False
