"""Disk as the journal sees it: free space, syncs, and errors that mean no room."""

import errno
import os
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(RuntimeError):
    """Lack of room: nothing of the commit is on disk; it can be tried again after `measure`."""


class SyncError(RuntimeError):
    """Failed sync: the contents of the disk are unknown.

    This process must end; the next one reads the disk.
    """


def no_room(directory: Path, error: OSError) -> DiskFull:
    """Return the error for a lack of room; raise `error`, with a path, if it has another cause."""
    if error.errno not in NO_ROOM:
        error.filename = error.filename or str(directory)
        raise error
    return DiskFull(f"{directory}: {os.strerror(error.errno or 0).lower()}")


def free_bytes(directory: Path) -> int:
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize
