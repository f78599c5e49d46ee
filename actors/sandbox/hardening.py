"""Hardening of the confined interpreter: limits, the filter of system calls, and checks of both.

Runs inside the sandbox beside `guest.py`, with the standard library alone.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
from typing import Any

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
CAPABILITY_VERSION = 0x20080522
HOME = "/tmp"
MORE_PROCESSES = 4  # that may be counted with ours: this one, and those that confine it
libc = ctypes.CDLL(None, use_errno=True)


class ConfinementError(Exception):
    """The confinement does not hold; the message names the gap."""


def harden(setup: dict[str, Any]) -> None:
    """Drop remaining rights, set limits, and check. ConfinementError names what does not hold."""
    limits = {
        resource.RLIMIT_CORE: 1,  # unlike 0 also keeps a crash from the host's core handler
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_FSIZE: setup["temporary_bytes"],
        resource.RLIMIT_NOFILE: setup["open_files"],
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise ConfinementError("no_new_privs cannot be set")
    limit_processes(setup["processes"])
    check()
    forbid(bytes.fromhex(setup["filter"]))


def limit_processes(count: int) -> None:
    """Limit the processes beside this one to `count`, by trial: the kernel may count others as
    well."""
    for limit in range(count, count + MORE_PROCESSES + 1):
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, count + MORE_PROCESSES))
        if forked(count + 1) == count:
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
            return
    limit = f"limited to {count} (root's are not counted)"
    raise ConfinementError(f"the number of processes cannot be {limit}")


def forked(most: int) -> int:
    """Count the processes that can live at once, up to `most`."""
    for count in range(most):
        try:
            if os.fork() == 0:
                while True:
                    signal.pause()
        except BlockingIOError:
            end_all()
            return count
    end_all()
    return most


def forbid(program: bytes) -> None:
    """Install the filter of system calls."""
    buffer = ctypes.create_string_buffer(program, len(program))
    filled = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filled, 0, 0):
        raise ConfinementError(f"seccomp: {os.strerror(ctypes.get_errno())}")
    try:
        socket.socket(socket.AF_INET).close()
    except PermissionError:
        return
    raise ConfinementError("seccomp lets through what it should not")


def check() -> None:
    """Raise ConfinementError unless this is process 1, without rights, network, /proc and writable
    places."""
    if os.getpid() != 1:
        raise ConfinementError("no process namespace")
    held = ctypes.create_string_buffer(24)
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    if libc.capget(header, held) or any(held.raw) or 0 in os.getresuid():
        raise ConfinementError("capabilities are left")
    if os.path.exists("/proc/self"):
        raise ConfinementError("/proc is there")
    if [name for _, name in socket.if_nameindex()] not in ([], ["lo"]):
        raise ConfinementError("a network is there")
    for place in ("/", os.path.dirname(__file__), "/dev"):
        if writable(place):
            raise ConfinementError(f"{place} can be written")
    if not writable(HOME):
        raise ConfinementError(f"{HOME} cannot be written")


def writable(place: str) -> bool:
    path = os.path.join(place, "written")
    try:
        with open(path, "w"):
            os.unlink(path)
    except OSError:
        return False
    return True


def end_all() -> dict[int, int]:
    """Kill every other process of the namespace; return the wait status of each by process id."""
    ended = {}
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # all at once, so that none can fork in between
    while True:
        try:
            process, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return ended
        ended[process] = status
