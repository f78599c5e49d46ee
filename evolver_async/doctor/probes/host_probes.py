"""Probes of the host: interpreter, memory, disk, sockets, sandbox and the key for W&B."""

import os
import platform
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from evolver_async.doctor.probes.result import ProbeResult
from evolver_async.memory.units import gib
from evolver_async.process.processors import processors

LEAST_PYTHON = (3, 11)
LEAST_SHM_BYTES = 64 << 20
LEAST_DISK_BYTES = 1 << 30
LEAST_FILES = 1024


def python() -> ProbeResult:
    """Read the version of Python, the number of cores and the size of the memory."""
    import psutil

    memory = psutil.virtual_memory().total
    summary = f"{platform.python_version()}, {processors()} cores, {gib(memory)} of memory"
    return ProbeResult(sys.version_info >= LEAST_PYTHON, summary, {"memory_bytes": memory})


def sandbox() -> ProbeResult:
    """Start an interpreter in a sandbox; it tests from inside what it can reach."""
    from evolver_async.launch.registry import resolve

    descriptions: Any = resolve("actors.sandbox.interpreters:WAYS")
    pool = resolve("actors.sandbox.interpreters:SandboxPool")(size=1)
    try:
        route = pool.start()
    except RuntimeError as error:
        return ProbeResult(False, str(error))
    finally:
        pool.close()
    return ProbeResult(True, descriptions[route])


def shared_memory(directory: str = "/dev/shm") -> ProbeResult:
    """Write a file in shared memory and read it back; measure the free space."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x" * (1 << 20))
            file.seek(0)
            same = file.read() == b"x" * (1 << 20)
    except OSError as error:
        return ProbeResult(False, f"{directory}: {error.strerror}")
    free = shutil.disk_usage(directory).free
    summary = f"{directory}, {gib(free)} free"
    return ProbeResult(same and free >= LEAST_SHM_BYTES, summary, {"free_bytes": free})


def sockets() -> ProbeResult:
    """Send a message over a socket file and over a loopback port."""
    import zmq

    with tempfile.TemporaryDirectory(prefix="evolver-") as directory:
        for address in (f"ipc://{directory}/socket", "tcp://127.0.0.1:*"):
            with zmq.Context() as context, context.socket(zmq.PAIR) as server:
                server.bind(address)
                with context.socket(zmq.PAIR) as client:
                    client.connect(server.get_string(zmq.LAST_ENDPOINT))
                    client.send(b"x")
                    if not server.poll(5000) or server.recv() != b"x":
                        return ProbeResult(False, f"no message arrives at {address}")
    return ProbeResult(True, f"ZeroMQ {zmq.zmq_version()}: socket files and loopback ports")


def encryption() -> ProbeResult:
    """Check that the installed ZeroMQ has CURVE encryption."""
    import zmq

    if zmq.has("curve"):
        return ProbeResult(True, "CurveZMQ")
    return ProbeResult(False, f"ZeroMQ {zmq.zmq_version()} without CURVE")


def wandb() -> ProbeResult:
    """Check that there is a key for the W&B server."""
    import wandb

    from evolver_async.metrics.wandb_process import has_key

    online = has_key()
    key = "has a key: online" if online else "no key: offline only"
    return ProbeResult(online, f"wandb {wandb.__version__}, {key}")


def disk(directory: str = "runs") -> ProbeResult:
    """Measure the free space where runs are written."""
    existing = Path(directory).expanduser().resolve()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    summary = f"{existing}, {gib(free)} free{'' if writable else ', not writable'}"
    return ProbeResult(free >= LEAST_DISK_BYTES and writable, summary, {"free_bytes": free})


def files() -> ProbeResult:
    """Read the limit of open files and sockets, to which a buffer raises its own."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return ProbeResult(True, "no limit")
    return ProbeResult(most >= LEAST_FILES, f"at most {most} per process")
