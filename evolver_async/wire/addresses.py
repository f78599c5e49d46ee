"""Addresses of a buffer: those that are open to other users, or in use, are refused.

Without keys only this host is allowed: a loopback address, or a socket file in a private directory.
"""

import errno
import os
import socket
import stat
from pathlib import Path

from evolver_async.config.sections.weight_channel import is_loopback

IPC_PATH_BYTES = 107  # of the kernel's socket address
EVERYWHERE = ("*", "0.0.0.0")


def from_here(address: str) -> str:
    """Return the address at which this host reaches a server bound to every interface."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or host not in EVERYWHERE:
        return address
    return f"tcp://127.0.0.1:{port}"


def beside(address: str, server: str) -> str:
    """Return an address of the host of `server`, where `address` is of every interface there."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    other, _, there = server.partition("://")
    if (scheme, other) != ("tcp", "tcp") or host not in (*EVERYWHERE, "[::]"):
        return address
    return f"tcp://{there.rpartition(':')[0]}:{port}"


def refuse_open_or_served(address: str, keyed: bool) -> None:
    """Raise ValueError if other users could connect, OSError if a server is there already."""
    scheme, _, place = address.partition("://")
    if scheme == "tcp":
        if keyed or is_loopback(place.rpartition(":")[0].strip("[]")):
            return
        raise ValueError(
            f"buffer.address: {address} can be reached from other hosts, which needs security.keys"
            " (a directory made by `evolver-async keys`); or use a loopback address"
        )
    if scheme != "ipc" or not place.startswith("/"):
        raise ValueError(f"buffer.address: {address} is neither ipc:///path nor tcp://host:port")
    path = Path(place)
    if len(os.fsencode(path)) > IPC_PATH_BYTES:
        raise ValueError(f"buffer.address: {address} is longer than {IPC_PATH_BYTES} bytes")
    if not path.parent.is_dir():
        raise ValueError(f"buffer.address: {path.parent} is not a directory")
    if stat.S_IMODE(path.parent.stat().st_mode) & 0o077:
        raise ValueError(f"buffer.address: the directory {path.parent} must have mode 0700")
    if not path.exists():
        return
    if not path.is_socket():
        raise OSError(errno.EEXIST, f"{address}: the file is not a socket")
    # libzmq replaces an existing socket file, so test for a server behind it first
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(place)
        except ConnectionRefusedError:
            return
        except TimeoutError:
            pass  # a server listens, with a full backlog
    raise OSError(errno.EADDRINUSE, f"{address}: address already in use")
