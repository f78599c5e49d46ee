"""Disk as the journal sees it: its lock, free space, syncs, and errors that mean no room."""

import fcntl
import os
from pathlib import Path
from typing import TextIO

from evolver_async.buffer.log.quarantine import JournalError
from evolver_async.room import NO_ROOM


class DiskFull(RuntimeError):
    """Lack of room: nothing of the commit is on disk; it can be tried again after `measure`."""


class SyncError(RuntimeError):
    """Failed sync: the contents of the disk are unknown.

    This process must end; the next one reads the disk.
    """


def lock(directory: Path) -> TextIO:
    """Lock a journal for this process until the file is closed. Raises JournalError."""
    file = open(directory / "lock", "w")  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        used = isinstance(error, BlockingIOError | PermissionError)
        cause = "in use by another process" if used else f"cannot be locked: {error.strerror}"
        raise JournalError(f"{directory}: {cause}") from error
    return file


def no_room(directory: Path, error: OSError) -> DiskFull:
    """Return the error for a lack of room; raise `error`, with a path, if it has another cause."""
    if error.errno not in NO_ROOM:
        error.filename = error.filename or str(directory)
        raise error
    return DiskFull(f"{directory}: {os.strerror(error.errno or 0).lower()}")


def free_bytes(directory: Path) -> int:
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize
