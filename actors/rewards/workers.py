"""Pool of processes that call the functions of reward terms, each killed at its deadline.

Functions of a user's own can hang, end their process or hold Python's lock for seconds: in a thread
of the actor each of these would stop generation. Calls block, so the caller makes them in threads.
"""

import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec

from actors.rewards.facts import Unscorable
from actors.rewards.worker import HEAD

START_S = 60.0  # for a process to start and to import a function
LARGEST_REPLY = 1 << 20  # bytes


class WorkerPool:
    """Pool of `size` processes, each started when it is first needed, or again after its death."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: queue.LifoQueue[_ScoringProcess | None] = queue.LifoQueue()
        self._living: set[_ScoringProcess] = set()
        for _ in range(size):
            self._free.put(None)

    def call(
        self, path: str, arguments: dict[str, Any], made: dict[str, int], timeout_s: float
    ) -> tuple[Any, dict[str, float]]:
        """Return a function's result and the metrics that it logged.

        `path`: module:function; `made`: see `worker.py`. Raises Unscorable if the function raised,
        ended its process or has not returned after `timeout_s`.
        """
        worker = self._free.get()
        try:
            if worker is None:
                worker = _ScoringProcess()
                self._living.add(worker)
            worker.load(path)
            request = {"path": path, "arguments": arguments, "made": made}
            reply = worker.ask(request, timeout_s)
        except BaseException:
            if worker is not None:
                self._living.discard(worker)
                worker.kill()
            worker = None
            raise
        finally:
            self._free.put(worker)
        if "error" in reply:
            raise Unscorable(f"failed: {reply['error']}")
        return reply["value"], reply["metrics"]

    def close(self) -> None:
        """End all processes, running calls included."""
        for worker in list(self._living):
            worker.end()


class _ScoringProcess:
    """One process, seen from the actor."""

    def __init__(self) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._loaded: set[str] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "actors.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,  # so that children of a function end with it
        )

    def load(self, path: str) -> None:
        """Import a function, which is not part of a call's time. Raises Unscorable."""
        if path not in self._loaded:
            self.ask({"path": path, "arguments": None, "made": {}}, START_S)
            self._loaded.add(path)

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request; return the reply. Raises Unscorable without one in time."""
        deadline = time.monotonic() + timeout_s
        content = msgspec.msgpack.encode(request)
        try:
            self._send(HEAD.pack(len(content)) + content, deadline)
            (length,) = HEAD.unpack(self._receive(HEAD.size, deadline))
            if length > LARGEST_REPLY:
                raise Unscorable(f"returned {length} bytes")
            return msgspec.msgpack.decode(self._receive(length, deadline))
        except TimeoutError:
            raise Unscorable(f"did not return within {timeout_s:g} s") from None
        except (OSError, EOFError):
            raise Unscorable("ended its process") from None

    def end(self) -> None:
        """End the process and what it has started; a call that waits for it fails."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process, and release what belongs to it."""
        self.end()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _send(self, content: bytes, deadline: float) -> None:
        assert self._process.stdin is not None
        fd, view = self._process.stdin.fileno(), memoryview(content)
        os.set_blocking(fd, False)
        while view:
            _wait(fd, select.POLLOUT, deadline)
            view = view[os.write(fd, view) :]

    def _receive(self, count: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd, parts = self._process.stdout.fileno(), b""
        while len(parts) < count:
            _wait(fd, select.POLLIN, deadline)
            part = os.read(fd, count - len(parts))
            if not part:
                raise EOFError
            parts += part
        return parts


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        raise TimeoutError
