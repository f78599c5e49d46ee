"""A Python process that answers one request at a time, each with a deadline: the actor's side.

For code of users, which can hang, end its process or hold Python's lock for seconds: in a thread of
the actor each of these would stop generation. Calls block, so the caller makes them in threads.
`child_main.py` is the other side.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec

from actors.child_main import HEAD


class ChildProcess:
    """One process that runs a module of this project. A reply has at most `largest_reply` bytes."""

    def __init__(self, module: str, largest_reply: int) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.largest_reply = largest_reply
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,  # so that what it starts ends with it
        )

    def ask(self, request: Any, timeout_s: float) -> Any:
        """Send a request; return the reply.

        Raises TimeoutError without one in time, EOFError if the process ended, ValueError for a
        reply that is too long. After any of these the process is of no use: `kill` it.
        """
        deadline = time.monotonic() + timeout_s
        content = msgspec.msgpack.encode(request)
        try:
            self._send(HEAD.pack(len(content)) + content, deadline)
            (length,) = HEAD.unpack(self._receive(HEAD.size, deadline))
            if length > self.largest_reply:
                raise ValueError(f"returned {length} bytes")
            return msgspec.msgpack.decode(self._receive(length, deadline))
        except TimeoutError:
            raise
        except OSError as error:
            raise EOFError from error

    def end(self) -> None:
        """End the process and what it has started; a call that waits for it fails."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> int:
        """End the process, and release what belongs to it; return its exit status."""
        self.end()
        status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return status

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
