"""The launcher for one machine: a buffer, a learner and `actors.count` actors as processes.

    starts    buffer → (answers STATUS) → experience, learner, actors
    watches   by handle; a process that ends is started again under a new incarnation, within the
              budget; past it the run ends, or goes on unguided without the experience service
    ends      when the learner is done, on a signal, or when somebody cannot be kept alive:
              learner first (it writes a checkpoint), then actors, then the services; each killed
              after `launch.drain_s`, or at once at the second signal; a checkpoint that is being
              written has `launch.drain_s` from its last progress

No child outlives this process, however it ends: the kernel kills them too (see `die_with`).
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from evolver_async.config import Config
from evolver_async.errors import EVALUATION_LOST, TRAINING_ERROR, USER_ERROR
from evolver_async.launch.gpus import VISIBLE, number_of, seen_by
from evolver_async.launch.patience import Patience
from evolver_async.launch.run_directory import announce, last_lines
from evolver_async.process.addresses import keys_of, make_weights_dir
from evolver_async.process.private_directories import PREFIX, Claim, claim, sweep
from evolver_async.protocol.messages import StatusRequest
from evolver_async.transport.client import Rejected
from evolver_async.transport.dealer import DealerClient

POLL_S = 0.1
START_S = 60.0  # until the buffer must answer
SEARCHED_LINES = 100  # of a log, for the error that a process ended with
FINAL = (
    USER_ERROR,
    TRAINING_ERROR,
    EVALUATION_LOST,
)  # exit codes of what starting again would only repeat
INCARNATIONS = 1000  # of one process in one launch, so that those of the next launch are higher

# glibc: do not give freed activations back to the kernel only to fault them in again a moment later
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}

log = logging.getLogger(__name__)


class RunFailed(Exception):
    """The run cannot go on; `code` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Child:
    """One role of the run and the process that plays it now, since `started`.

    `restarts` counts those of its budget that are spent; `due` is when the next one starts. A
    learner of several ranks has `others` beside its first; they live and die together.
    """

    role: str
    name: str
    process: subprocess.Popen[bytes]
    incarnation: int
    restarts: int = 0
    due: float | None = None
    started: float = field(default_factory=time.monotonic)
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)
    culprit: int | None = None  # of its processes the one that ended badly, and the others by that

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [self.process, *self.others]

    @property
    def blamed(self) -> tuple[str, int]:
        """Name and pid of the process that tells why it ended."""
        index = self.culprit or 0
        return (f"{self.name}-{index}" if index else self.name), self.processes[index].pid

    def poll(self) -> int | None:
        """How it ended, None while it runs; where one of several processes died the others are
        killed."""
        if not self.others:
            return self.process.poll()
        if self.culprit is None:
            codes = [process.poll() for process in self.processes]
            bad = [index for index, code in enumerate(codes) if code]
            if not bad or codes[0] == 0:  # when the first has done its work the others only leave
                return codes[0]
            # What says why comes first; a rank that lost another says only that.
            self.culprit = min(bad, key=lambda i: (codes[i] not in FINAL, (codes[i] or 0) > 0))
            for process in self.processes:
                process.kill()
                process.wait()
        return self.processes[self.culprit].returncode


def run(config: Config, run_dir: Path) -> int:
    """Run to the end; returns 0, 128 + the signal that ended it, or a failure's exit code."""
    claims: list[Claim] = []
    try:
        for parent in (Path(config.weights.dir), Path(tempfile.gettempdir())):
            sweep(parent)
        claims.append(claim(make_weights_dir(config, run_dir)))
        # short and private, as ipc wants it
        claims.append(claim(Path(tempfile.mkdtemp(prefix=PREFIX))))
    except OSError as error:
        log.error("%s", error)
        for one in claims:
            one.remove()
        return USER_ERROR
    sockets = claims[-1].directory
    address = config.buffer.address or f"ipc://{sockets}/buffer"
    launcher = Launcher(config, run_dir, address, sockets)
    try:
        with launcher.heeding_signals():
            try:
                launcher.start()
                launcher.watch()
            except RunFailed as failure:
                log.error("%s", failure)
                return failure.code
            finally:
                launcher.end()
        return 128 + launcher.signals[0] if launcher.signals else 0
    finally:
        for one in claims:
            one.remove()


class Launcher:
    """The children of one launch. `private`: a directory in which the ranks of a learner meet."""

    def __init__(
        self, config: Config, run_dir: Path, address: str, private: Path | None = None
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.address = address
        self.private = private
        self.keys = keys_of(config)
        self.children: list[Child] = []
        self.signals: list[int] = []
        self.first_incarnation = announce(run_dir, address) * INCARNATIONS

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Collect SIGINT and SIGTERM instead of dying of them."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(n, lambda n, _: self.signals.append(n)) for n in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def start(self) -> None:
        """The buffer first: when it cannot serve, nothing else was started."""
        buffer = self.add("buffer", "buffer")
        deadline = time.monotonic() + START_S
        while not self.signals and not asyncio.run(self.answers()):
            code = buffer.poll()
            if code is not None and code < 0:
                self.tend(buffer, time.monotonic())  # killed: started again, as at any later time
            elif code is not None:
                raise RunFailed(
                    f"the buffer did not start: {self.last_words(buffer, 1)}", USER_ERROR
                )
            if time.monotonic() > deadline:
                raise RunFailed(f"the buffer does not answer at {self.address}", 1)
        if self.signals:
            return
        if self.config.experience.kind != "none":
            self.add("experience", "experience")
        self.add("learner", "learner")
        for index in range(self.config.actors.count):
            self.add("actor", f"actor-{index}")

    def watch(self) -> None:
        """Return when the learner is done or a signal came. Raises RunFailed."""
        while not self.signals:
            for child in list(self.children):
                if child.role == "learner" and child.poll() == 0:
                    return
                self.tend(child, time.monotonic())
            time.sleep(POLL_S)

    def tend(self, child: Child, now: float) -> None:
        """Start a child again that has died, after its pause and within its budget."""
        code = child.poll()
        if code is None:
            return
        if child.due is not None:
            if now >= child.due:
                child.due = None
                child.incarnation += 1
                self.spawn_all(child)
                child.started = now
        elif child.role == "experience" and not self.may_restart(child, code, now):
            log.warning(
                "%s %s and is not started again: episodes go unguided from now on: %s",
                child.name,
                _ended(code),
                self.sentence(child),
            )
            self.children.remove(child)
        elif code == EVALUATION_LOST:
            raise RunFailed(self.sentence(child), code)
        elif code in FINAL:
            raise RunFailed(f"{child.name} cannot go on: {self.sentence(child)}", code)
        else:
            self.plan_restart(child, code, now)

    def may_restart(self, child: Child, code: int, now: float) -> bool:
        """Whether a child that ended like this has a start left in its budget."""
        if now - child.started >= self.config.launch.healthy_s:
            child.restarts = 0
        again = code not in FINAL
        return again and child.restarts < self.config.launch.restarts

    def plan_restart(self, child: Child, code: int, now: float) -> None:
        """Say when it is started again. RunFailed where its budget is spent."""
        launch = self.config.launch
        ran_s = now - child.started
        if not self.may_restart(child, code, now):
            raise RunFailed(
                f"{child.name} {_ended(code)} and is not started again"
                f" (restarted {child.restarts} times, ran {ran_s:.0f} s):\n"
                f"{self.last_words(child)}",
                1,
            )
        pause_s = launch.backoff_s * 2**child.restarts
        child.due = now + pause_s
        child.restarts += 1
        log.warning(
            "%s %s, restart %d of %d in %.1f s: %s",
            child.name,
            _ended(code),
            child.restarts,
            launch.restarts,
            pause_s,
            self.last_words(child, 1),
        )

    def end(self) -> None:
        """End every child, by handle; who must wait for others loses none of its own time."""
        for role in ("learner", "actor", "experience", "buffer"):
            running = [p for child in self.children if child.role == role for p in child.processes]
            for process in running:
                process.terminate()
            self.await_end(role, running)
        for child in self.children:
            for process in child.processes:
                if process.poll() is None:
                    log.warning("%s did not end by itself and is killed", child.name)
                    process.kill()
                process.wait()

    def await_end(self, role: str, running: list[subprocess.Popen[bytes]]) -> None:
        """Return when these have ended, when patience is exhausted, or at the second signal."""
        begun, drain_s, told = time.monotonic(), self.config.launch.drain_s, False
        checkpoints = self.run_dir / "checkpoints" if role == "learner" else None
        patience = Patience(drain_s, begun, checkpoints)
        while any(process.poll() is None for process in running):
            now = time.monotonic()
            if len(self.signals) > 1 or patience.exhausted(now):
                return
            if now > begun + drain_s and not told:
                told = True
                log.warning("the learner is still writing its checkpoint; a second signal kills it")
            time.sleep(POLL_S / 2)

    async def answers(self) -> bool:
        """Whether the buffer of this very run replies within a moment."""
        client = DealerClient(self.address, self.run_dir.name, "launcher", keys=self.keys)
        try:
            await client.request(StatusRequest(), timeout_s=5 * POLL_S)
        except TimeoutError:
            return False
        except Rejected as error:
            raise RunFailed(f"buffer.address: {self.address}: {error}", USER_ERROR) from None
        finally:
            client.close()
        return True

    def add(self, role: str, name: str) -> Child:
        incarnation = self.first_incarnation
        child = Child(role, name, self.spawn(role, name, incarnation), incarnation)
        child.others = self.spawn_others(child)
        self.children.append(child)
        return child

    def spawn_all(self, child: Child) -> None:
        """Start the processes of a child that has died."""
        child.process = self.spawn(child.role, child.name, child.incarnation)
        child.others = self.spawn_others(child)
        child.culprit = None

    def spawn_others(self, child: Child) -> list[subprocess.Popen[bytes]]:
        """The ranks of a learner beside its first."""
        ranks = range(1, self.config.learner.ranks if child.role == "learner" else 1)
        return [
            self.spawn(child.role, f"{child.name}-{rank}", child.incarnation, rank)
            for rank in ranks
        ]

    def spawn(
        self, role: str, name: str, incarnation: int, rank: int = 0
    ) -> subprocess.Popen[bytes]:
        """A process in a session of its own, so that a Ctrl-C reaches this one alone."""
        threads = {"actor": self.config.engine.threads, "learner": self.config.learner.threads}
        options = {
            "--connect": self.address,
            "--run": self.run_dir,
            "--name": name,
            "--incarnation": incarnation,
            "--parent": os.getpid(),
        } | ({} if self.keys is None else {"--keys": self.keys})
        if role == "learner" and self.config.learner.ranks > 1:
            assert self.private is not None
            options |= {"--rank": rank, "--meeting": self.private / f"ranks-{incarnation}"}
        with open(self.log_file(name), "ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "evolver_async.cli", role]
                + [str(text) for option in options.items() for text in option],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {"OMP_NUM_THREADS": str(threads.get(role, 1)), "TOKENIZERS_PARALLELISM": "false"}
                | KEEP_MEMORY
                | self._temporary(role)
                | seen_by(self.config, role, number_of(name), os.environ.get(VISIBLE)),
            )

    def _temporary(self, role: str) -> dict[str, str]:
        """Keep a learner's temporary files in the launch's directory: a killed W&B leaves some."""
        private = self.private if role == "learner" else None
        return {} if private is None else {"TMPDIR": str(private)}

    def log_file(self, name: str) -> Path:
        (self.run_dir / "logs").mkdir(exist_ok=True)
        return self.run_dir / "logs" / f"{name}.log"

    def last_words(self, child: Child, count: int = 5) -> str:
        return last_lines(self.log_file(child.blamed[0]), count)

    def sentence(self, child: Child) -> str:
        """The last error that this very process logged, else the last line there is."""
        lines = self.last_words(child, SEARCHED_LINES).splitlines()
        for line in reversed(lines):
            if f"pid {child.blamed[1]}" in line:
                break  # what comes before was written by an earlier process of this name
            if " ERROR " in line:
                return line
        return lines[-1] if lines else ""


def _ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else "left the running job (exit code 0)"
