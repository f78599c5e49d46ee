"""Child processes of a launcher: command line, environment, exit code and log."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from evolver_async.config import Config
from evolver_async.durations import utc
from evolver_async.errors import DISK_FULL, EVALUATION_LOST, STOPPED, TRAINING_ERROR, USER_ERROR
from evolver_async.launch.run_directory import SEARCHED_LINES, last_error, last_lines
from evolver_async.launch.visible_gpus import VISIBLE, index_of, visible_gpus
from evolver_async.process.rendezvous import keys_of
from evolver_async.room import lacks_room

FINAL = (USER_ERROR, TRAINING_ERROR, EVALUATION_LOST)  # exit codes that a restart would repeat
NO_ERROR = "no error was logged"
WARNING = re.compile(r"^warnings\.warn\(|:\d+: \w*Warning: ")
FRAME = "+-| "  # what surrounds the traceback of an exception group
CRASHED = 1  # exit code after any other error

# glibc: do not return freed activations to the kernel only to fault them in again a moment later
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
# oneDNN keeps what it has prepared for a thousand numbers of rows: hundreds of MiB for batches of
# all sizes, and no faster than with the last few of them.
FEW_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "LRU_CACHE_CAPACITY": "8"}


class Unreachable(Exception):
    """The service that places processes is gone; the message says what to do."""


class Handle(Protocol):
    """A process wherever it runs, as `subprocess.Popen` holds one of this host.

    Its pid is 0 while it waits for a place. A negative exit code is the signal that ended it.
    """

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


@dataclass
class Child:
    """One role of the run and its present process, which runs since `started`.

    `restarts` is the used part of its budget; `due` is the time of the next restart. A learner of
    several ranks has `others` beside its first, which is rank `first`; all of them end together.
    """

    role: str
    name: str
    process: Handle
    incarnation: int
    restarts: int = 0
    due: float | None = None
    started: float = field(default_factory=time.monotonic)
    others: list[Handle] = field(default_factory=list)
    first: int = 0
    failed_rank: int | None = None  # the rank whose end made the launcher kill the others
    moves: bool = False  # it was asked to leave a place that is drained
    disk_failed: float = -math.inf  # time of the failure of its disk that used a restart
    leaves_by: float | None = None  # the time by which an actor that is not wanted has left

    @property
    def processes(self) -> list[Handle]:
        return [self.process, *self.others]

    @property
    def failed_process(self) -> tuple[str, int]:
        """Name and pid of the process whose log holds the cause of the end."""
        place = self.failed_rank or 0
        rank = self.first + place
        return (f"{self.name}-{rank}" if rank else self.name), self.processes[place].pid

    def poll(self) -> int | None:
        """Return the exit code, None while it runs. Kill all ranks if one of several died."""
        if not self.others:
            return self.process.poll()
        if self.failed_rank is None:
            codes = [process.poll() for process in self.processes]
            bad = [rank for rank, code in enumerate(codes) if code]
            if not bad or codes[0] == 0:  # after the first rank is done the others only exit
                return codes[0]
            # A code that names the cause comes first; a rank that lost another one only says that.
            self.failed_rank = min(bad, key=lambda i: (codes[i] not in FINAL, (codes[i] or 0) > 0))
            if codes[0] == STOPPED:  # it has saved, and the others only exit
                self.failed_rank = 0
            for process in self.processes:
                process.kill()
                process.wait()
        return self.processes[self.failed_rank].poll()


@dataclass
class Spawner(ABC):
    """Starts the processes of one launch. Launchers differ in where: `place` is theirs."""

    config: Config
    run_dir: Path
    address: str

    @property
    def keys(self) -> Path | None:
        """The directory of the run's keys, None if it has none."""
        return keys_of(self.config)

    @abstractmethod
    def place(
        self, role: str, name: str, incarnation: int, rank: int, arguments: list[str]
    ) -> Handle:
        """Start a process with these arguments of the command line, and those of its place."""

    def answers(self) -> bool:
        """False while the service that places processes is silent; Unreachable after too long."""
        return True

    def moves(self, handle: Handle) -> bool:
        """True if a process must leave its place, and can go on in another one."""
        return False

    def bound(self, role: str) -> bool:
        """True if processes of a role have one place only."""
        return True

    def place_of(self, role: str) -> str:
        """Name the place of a role that has no other one, and how to give it another."""
        return "place"

    def hinders(self, handle: Handle, waiting: Handle) -> bool:
        """True if the place of a process can serve one that waits for its own."""
        return False

    def lost(self, handle: Handle) -> bool:
        """True if a process ended with its host, which uses none of its restarts."""
        return False

    def start(self, role: str, name: str, incarnation: int, rank: int = 0) -> Handle:
        """Start the process of a child, or the one of a rank beside its first."""
        arguments = [role, "--connect", self.address, "--name", name]
        arguments += ["--incarnation", str(incarnation)]
        if role == "learner" and self.config.learner.ranks > 1:
            arguments += ["--rank", str(rank)]
        return self.place(role, name, incarnation, rank, arguments)

    def failed(self, name: str, cause: str, code: int) -> "FailedStart":
        """Note in the log of a process why it cannot be started; return its handle."""
        line = f"{utc()} ERROR {__name__}: {name} cannot be started: {cause}\n"
        with suppress(OSError), open(self.log_file(name), "a", encoding="utf-8") as log_file:
            log_file.write(line)
        return FailedStart(code)

    def start_others(self, role: str, name: str, incarnation: int, first: int = 0) -> list[Handle]:
        """Start the ranks of a learner beside the first one of its host."""
        count = self.config.learner.ranks_per_host if role == "learner" else 1
        ranks = range(first + 1, first + count)
        return [self.start(role, f"{name}-{rank}", incarnation, rank) for rank in ranks]

    def variables(self, role: str) -> dict[str, str]:
        """Return what every process of a role has in its environment, on any host."""
        threads = {"actor": self.config.engine.threads, "learner": self.config.learner.threads}
        return {
            "OMP_NUM_THREADS": str(threads.get(role, 1)),
            "TOKENIZERS_PARALLELISM": "false",
        } | (KEEP_MEMORY | FEW_SHAPES)

    def log_file(self, name: str) -> Path:
        (self.run_dir / "logs").mkdir(exist_ok=True)
        return self.run_dir / "logs" / f"{name}.log"

    def log_tail(self, child: Child, count: int = 5) -> str:
        """Return the last lines of the log of the process that failed."""
        return last_lines(self.log_file(child.failed_process[0]), count)

    def last_line(self, child: Child) -> str:
        """Return the last line of that log that says something."""
        return innermost(self.log_tail(child, SEARCHED_LINES).splitlines())

    def last_error(self, child: Child) -> str:
        """Return the last error that the present process logged, else the last line of its log if
        that is no message."""
        name, pid = child.failed_process
        # earlier lines come from an earlier process of this name
        error = last_error(self.log_file(name), since=f"pid {pid}")
        if error:
            return error.partition("\n")[0]
        last = self.last_line(child)
        return NO_ERROR if not last or " INFO " in last or " WARNING " in last else last


def innermost(lines: list[str]) -> str:
    """Return the last informative line, without the frame of an exception group.

    A warning of Python's, as its exit gives for memory that a dead process has left, says nothing.
    """
    stripped = (line.strip().lstrip(FRAME) for line in reversed(lines))
    return next((line for line in stripped if line and not WARNING.search(line)), "")


@dataclass
class FailedStart:
    """Handle of a process that could not be started: it has crashed, and can be started again."""

    code: int = CRASHED
    pid = 0

    def poll(self) -> int:
        return self.code

    def wait(self) -> int:
        return self.code

    def terminate(self) -> None:
        """Do nothing, as there is no process."""

    kill = terminate


@dataclass
class LocalSpawner(Spawner):
    """Starts processes of this host, in sessions of their own: Ctrl-C reaches only the launcher.

    `private` is a directory in which the ranks of a learner find each other.
    """

    private: Path | None

    def place(
        self, role: str, name: str, incarnation: int, rank: int, arguments: list[str]
    ) -> Handle:
        command = [sys.executable, "-m", "evolver_async.cli", *arguments]
        command += ["--run", str(self.run_dir), "--parent", str(os.getpid())]
        command += [] if self.keys is None else ["--keys", str(self.keys)]
        variables = self.variables(role)
        if role == "learner" and self.private is not None:
            # A killed W&B leaves temporary files; this directory is removed with the launch.
            variables["TMPDIR"] = str(self.private)
            if self.config.learner.ranks > 1 and self.config.learner.hosts == 1:
                command += ["--meeting", str(self.private / f"ranks-{incarnation}")]
        gpus = visible_gpus(self.config, role, index_of(name), os.environ.get(VISIBLE))
        try:
            with open(self.log_file(name), "ab") as output:
                return subprocess.Popen(
                    command,
                    # Ctrl-C reaches the launcher alone, which ends its children in order.
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | variables | gpus,
                )
        except OSError as error:  # memory, process numbers or disk are short at this moment
            return self.failed(name, str(error), DISK_FULL if lacks_room(error) else CRASHED)


def ending(code: int) -> str:
    """Describe the end of a process by its exit code, as a predicate of its name."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == STOPPED:
        return f"was stopped before it had finished (exit code {code})"
    return f"ended with exit code {code}" if code else "left the running job (exit code 0)"
