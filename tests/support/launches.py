"""A `train` command as a process, and what can be seen of it from outside. Waits have deadlines."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from evolver_async.launch.run_directory import address_of, last_lines
from evolver_async.metrics.tail import Tail
from evolver_async.runs.watch.status_text import ask

DEADLINE_S = 120.0
COMMAND = [sys.executable, "-m", "evolver_async"]


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first truth that `condition` says; AssertionError when it takes too long."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {deadline_s:.0f} s for {what}")


def free_port() -> int:
    """A port of this host that nothing listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def fair_time() -> float:
    """A monotonic clock in seconds, less what the host of a virtual machine took from its cores.

    For bounds on durations: shared hosts take all of a core for seconds at a time.
    """
    return time.monotonic() - getattr(psutil.cpu_times(), "steal", 0.0)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_step(row: dict[str, Any]) -> bool:
    """True for a row of a step; others tell of evaluations and failures."""
    return "stage_kind" in row


class Launch:
    """One launcher process."""

    def __init__(self, run_dir: Path, *arguments: object) -> None:
        self.run_dir = run_dir
        self.tail = Tail(run_dir / "metrics.jsonl")
        self.tail.rows()
        self.unread: list[dict[str, Any]] = []
        self.printed = ""  # to stdout, complete after `end`
        self.process = subprocess.Popen(
            [*COMMAND, "train", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def children(self) -> dict[str, psutil.Process]:
        """The running roles by name."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # died meanwhile
                line = child.cmdline()
                if "--connect" in line:
                    found[line[line.index("--name") + 1]] = child
        return found

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the metrics that were not looked at yet; none of them is seen again."""
        rows, self.unread = self.unread + self.tail.rows(), []
        return rows

    def wait_for_row(
        self,
        matches: Callable[[dict[str, Any]], bool],
        what: str,
        deadline_s: float = DEADLINE_S,
    ) -> dict[str, Any]:
        """The next row of the metrics that matches; those before it are not seen again."""

        def look() -> dict[str, Any] | None:
            ended = self.process.poll() is not None
            self.unread += self.tail.rows()
            while self.unread:
                if matches(row := self.unread.pop(0)):
                    return row
            if ended:
                raise AssertionError(f"ended before {what}: {self.end()}; {self.logs()}")
            return None

        return wait_for(look, what, deadline_s)

    def wait_for_steps(self, count: int, deadline_s: float = DEADLINE_S) -> None:
        """Wait for so many steps, for each as long as the deadline."""
        for _ in range(count):
            self.wait_for_row(is_step, "a step", deadline_s)

    def status(self) -> dict[str, Any]:
        """The buffer's STATUS."""
        return asyncio.run(ask(address_of(self.run_dir), timeout_s=DEADLINE_S))

    def end(self) -> tuple[int, str]:
        """Wait for the launcher; its exit code and what it wrote to stderr."""
        self.printed, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors

    def logs(self) -> str:
        return "\n".join(
            f"{path.name}: {last_lines(path)}" for path in self.run_dir.glob("logs/*.log")
        )


@contextlib.contextmanager
def launching() -> Iterator[Callable[..., Launch]]:
    """Starts launches and makes sure that none outlives its test."""
    started: list[Launch] = []

    def start(run_dir: Path, *arguments: object) -> Launch:
        started.append(Launch(run_dir, *arguments))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            if one.process.poll() is None:
                one.process.kill()
            one.process.communicate()
