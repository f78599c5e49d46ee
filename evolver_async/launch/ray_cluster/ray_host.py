"""The Ray actor that runs one process of a run on the node where Ray placed it.

Only the exit code and the lines of the log return through Ray. The process dies with its Ray actor.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import ray  # pyright: ignore[reportMissingImports]

from evolver_async.process.private_directories import PREFIX, Claim, claim, sweep

MOST_BYTES = 64 * 1024  # of the log in one reply, which Ray then keeps out of its object store
WATCH_S = 1.0  # after which a reply comes, though nothing has happened
LOOK_S = 0.1  # between two looks at the process


@dataclass(frozen=True)
class Order:
    """A process to start: what `Spawner.place` of this launcher gives to a node.

    `secrets` (variables of the environment) and `keys` (files, by path) are no part of its text.
    """

    arguments: list[str]
    variables: dict[str, str]
    directory: str  # the working directory, if the node has it
    log: str = ""  # a file that the node sees; else the lines are returned
    meeting: str = ""  # name of the directory in which the ranks of a learner find each other
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    keys: dict[str, bytes] = field(default_factory=dict, repr=False)


class ProcessHost:
    """One process of a run. The Ray actor is asynchronous: a signal passes a waiting `watch`."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))  # of killed processes: launches sweep their own node
        self.claim = claim(Path(tempfile.mkdtemp(prefix=PREFIX)))
        self.private = self.claim.directory
        self.log = self.private / "log"
        self.meeting: Claim | None = None
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self, order: Order) -> tuple[int, str]:
        """Start the process; return its pid and the node's id."""
        command = [sys.executable, "-m", "evolver_async.cli", *order.arguments]
        command += ["--parent", str(os.getpid())]
        if order.keys:
            command += ["--keys", str(self._write_keys(order.keys))]
        if order.meeting:
            self.meeting = claim(Path(tempfile.gettempdir()) / order.meeting)
            command += ["--meeting", str(self.meeting.directory / "ranks")]
        directory = order.directory if os.path.isdir(order.directory) else None
        with open(order.log or self.log, "ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | order.variables | order.secrets | {"TMPDIR": str(self.private)},
            )
        return self.process.pid, ray.get_runtime_context().get_node_id()

    async def watch(self, offset: int) -> tuple[int | None, bytes]:
        """Return the exit code, None while it runs, and the log from `offset` on."""
        assert self.process is not None
        for _ in range(round(WATCH_S / LOOK_S)):
            code, output = self.process.poll(), self._read(offset)
            if output:
                return None, output  # the code comes after the last line
            if code is not None:
                self.claim.remove()
                if self.meeting is not None:
                    self.meeting.remove()
                return code, b""
            await asyncio.sleep(LOOK_S)
        return None, b""

    async def signal(self, number: int) -> None:
        """Send a signal to the process if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.Signals(number))

    def _read(self, offset: int) -> bytes:
        try:
            with open(self.log, "rb") as file:
                file.seek(offset)
                return file.read(MOST_BYTES)
        except FileNotFoundError:
            return b""  # removed after the last look

    def _write_keys(self, files: dict[str, bytes]) -> Path:
        """Write key files for this user alone; return their directory."""
        directory = self.private / "keys"
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
        return directory
