"""Memory mapped from files, as arrays, or read where a mapping would be dangerous.

Python's own mmap holds the interpreter while it unmaps: 17 to 38 ms for 400 MB, during which an
actor's event loop stands still. Here memory is unmapped in pieces, without the interpreter, in
whichever thread drops the last reference. The array keeps the file open, and so its `flock`.
"""

import ctypes
import errno
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from evolver_async.process.mounts import mount_of
from evolver_async.schema import Array

PIECE = 4 << 20  # bytes unmapped at once: the process can map nothing else meanwhile
READ_BYTES = 64 << 20  # read by one call
MEMORY = ("tmpfs", "ramfs")
NETWORK = (
    *("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "beegfs", "gpfs", "afs", "9p", "virtiofs"),
    *("wekafs", "panfs", "orangefs", "pvfs2"),
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FAILED = ctypes.c_void_p(-1).value


def map_file(file: int, size: int, *, shared: bool) -> Array:
    """Map the first bytes of an open file; the array owns the descriptor `file` from here on.

    Changes of the array reach a `shared` file; otherwise they stay in this process. OSError, with
    the file closed, if there is no room.
    """
    kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, file, 0)
    if address == FAILED:
        os.close(file)
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    area: Any = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(area, _unmap, file, address, size).atexit = False
    return np.frombuffer(area, np.uint8)


def read_file(file: int, size: int) -> Array:
    """Read the first bytes of an open file, and close it. OSError, ESTALE if it has less."""
    found_N, at = np.empty(size, np.uint8), 0
    try:
        while at < size:
            count = os.preadv(file, [found_N.data[at : at + READ_BYTES]], at)
            if not count:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            at += count
    finally:
        os.close(file)
    return found_N


def in_memory(directory: Path) -> bool:
    """True if the directory's file system is this host's memory."""
    return mount_of(directory.stat().st_dev).kind in MEMORY


def on_network(file: int) -> bool:
    """True if another host can delete an open file while this one reads it.

    Reading it fails then; reading a mapping of it kills the process (SIGBUS).
    """
    return mount_of(os.fstat(file).st_dev).kind.startswith(NETWORK)


def _unmap(file: int, address: int, size: int) -> None:
    for start in range(0, size, PIECE):
        _libc.munmap(address + start, min(PIECE, size - start))
    os.close(file)
