"""Memory mapped from files, as arrays.

Python's own mmap holds the interpreter while it unmaps: 17 to 38 ms for 400 MB, during which an
actor's event loop stands still. Here memory is unmapped in pieces, without the interpreter, in
whichever thread drops the last reference. The array keeps the file open, and so its `flock`.
"""

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from evolver_async.schema import Array

PIECE = 4 << 20  # bytes unmapped at once: the process can map nothing else meanwhile
MOUNTS = Path("/proc/self/mountinfo")

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


def in_memory(directory: Path) -> bool:
    """True if the directory's file system is this host's memory."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in MOUNTS.read_text().splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    return False


def _unmap(file: int, address: int, size: int) -> None:
    for start in range(0, size, PIECE):
        _libc.munmap(address + start, min(PIECE, size - start))
    os.close(file)
