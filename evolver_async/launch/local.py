"""The launcher for one machine: a buffer, a learner and `actors.count` actors as processes.

    starts     buffer → (answers STATUS) → experience, learner, actors
    supervises by handle; a process that ends is restarted under a new incarnation, within its
               budget; beyond it the run ends, or continues unguided without the experience service
    ends       when the learner is done, on a signal, or when a process cannot be kept alive: the
               learner first (it writes a checkpoint), then actors, then services; each is killed
               after `launch.drain_s`, or at once at the second signal; a checkpoint that is being
               written has `launch.drain_s` from its last progress

No child outlives this process, however it ends: the kernel kills them too (see `die_with`).
"""

import asyncio
import logging
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evolver_async.checkpoint import directory as checkpoint
from evolver_async.config import Config
from evolver_async.errors import EVALUATION_LOST, USER_ERROR
from evolver_async.launch.child import FINAL, Child, Spawner, ending
from evolver_async.launch.run_directory import announce
from evolver_async.process.addresses import keys_of, make_weights_dir
from evolver_async.process.private_directories import PREFIX, Claim, claim, sweep
from evolver_async.protocol.messages import StatusRequest
from evolver_async.transport.client import Rejected
from evolver_async.transport.dealer import DealerClient

POLL_S = 0.1
START_S = 60.0  # until the buffer must answer
INCARNATIONS = 1000  # of one process in one launch; those of the next launch are higher

log = logging.getLogger(__name__)


class RunFailed(Exception):
    """The run cannot continue; `code` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def run(config: Config, run_dir: Path) -> int:
    """Run to the end; return 0, 128 + the signal that ended it, or the exit code of a failure."""
    claims: list[Claim] = []
    try:
        for parent in (Path(config.weights.dir), Path(tempfile.gettempdir())):
            sweep(parent)
        claims.append(claim(make_weights_dir(config, run_dir)))
        # ipc addresses must be short, and the directory private
        claims.append(claim(Path(tempfile.mkdtemp(prefix=PREFIX))))
    except OSError as error:
        log.error("%s", error)
        for one in claims:
            one.remove()
        return USER_ERROR
    private = claims[-1].directory
    address = config.buffer.address or f"ipc://{private}/buffer"
    launcher = Launcher(config, run_dir, address, private)
    try:
        with launcher.collecting_signals():
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
    """Supervisor of the children of one launch.

    `private` is a directory in which the ranks of a learner find each other.
    """

    def __init__(
        self, config: Config, run_dir: Path, address: str, private: Path | None = None
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.address = address
        self.keys = keys_of(config)
        self.spawner = Spawner(config, run_dir, address, self.keys, private)
        self.children: list[Child] = []
        self.signals: list[int] = []
        self.first_incarnation = announce(run_dir, address) * INCARNATIONS

    @contextmanager
    def collecting_signals(self) -> Iterator[None]:
        """Collect SIGINT and SIGTERM in `signals` instead of ending at once."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(n, lambda n, _: self.signals.append(n)) for n in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def start(self) -> None:
        """Start the buffer, and the other processes once it answers. Raises RunFailed."""
        buffer = self.add("buffer", "buffer")
        deadline = time.monotonic() + START_S
        while not self.signals and not asyncio.run(self.buffer_answers()):
            code = buffer.poll()
            if code is not None and code < 0:
                self.supervise(buffer, time.monotonic())  # a killed buffer is restarted
            elif code is not None:
                cause = self.spawner.log_tail(buffer, 1)
                raise RunFailed(f"the buffer did not start: {cause}", USER_ERROR)
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"the buffer does not answer at {self.address} within {START_S:.0f} s,"
                    f" see {self.spawner.log_file('buffer')}",
                    1,
                )
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
                self.supervise(child, time.monotonic())
            time.sleep(POLL_S)

    def supervise(self, child: Child, now: float) -> None:
        """Restart a child that has ended, after its pause and within its budget."""
        code = child.poll()
        if code is None:
            return
        if child.due is not None:
            if now >= child.due:
                self.restart(child, now)
        elif child.role == "experience" and not self.may_restart(child, code, now):
            log.warning(
                "%s %s and is not started again; episodes go unguided from now on: %s",
                child.name,
                ending(code),
                self.spawner.last_error(child),
            )
            self.children.remove(child)
        elif code == EVALUATION_LOST:
            raise RunFailed(self.spawner.last_error(child), code)
        elif code in FINAL:
            cause = self.spawner.last_error(child)
            raise RunFailed(f"{child.name} cannot go on: {cause}", code)
        else:
            self.plan_restart(child, code, now)

    def may_restart(self, child: Child, code: int, now: float) -> bool:
        """True if a child that ended with this code has a restart left in its budget."""
        if now - child.started >= self.config.launch.healthy_s:
            child.restarts = 0
        return code not in FINAL and child.restarts < self.config.launch.restarts

    def plan_restart(self, child: Child, code: int, now: float) -> None:
        """Set the time of the next restart. RunFailed if the budget is spent."""
        launch = self.config.launch
        ran_s = now - child.started
        if not self.may_restart(child, code, now):
            raise RunFailed(
                f"{child.name} {ending(code)} and is not started again"
                f" (restarted {child.restarts} times, ran {ran_s:.0f} s):\n"
                f"{self.spawner.log_tail(child)}",
                1,
            )
        pause_s = launch.backoff_s * 2**child.restarts
        child.due = now + pause_s
        child.restarts += 1
        end, cause = f"{child.name} {ending(code)}", self.spawner.log_tail(child, 1)
        restart = f"restart {child.restarts} of {launch.restarts} in {pause_s:.1f} s"
        log.warning("%s, %s: %s", end, restart, cause)

    def restart(self, child: Child, now: float) -> None:
        """Start the processes of a child again under the next incarnation."""
        child.due, child.started, child.failed_rank = None, now, None
        child.incarnation += 1
        child.process = self.spawner.start(child.role, child.name, child.incarnation)
        child.others = self.spawner.start_others(child.role, child.name, child.incarnation)

    def add(self, role: str, name: str) -> Child:
        """Start a child and supervise it from now on."""
        incarnation = self.first_incarnation
        child = Child(role, name, self.spawner.start(role, name, incarnation), incarnation)
        child.others = self.spawner.start_others(role, name, incarnation)
        self.children.append(child)
        return child

    def end(self) -> None:
        """End every child by handle, role after role; each role has its own time."""
        for role in ("learner", "actor", "experience", "buffer"):
            running = [p for child in self.children if child.role == role for p in child.processes]
            for process in running:
                process.terminate()
            self.wait_for_end(role, running)
        for child in self.children:
            for process in child.processes:
                if process.poll() is None:
                    log.warning("%s did not end by itself and is killed", child.name)
                    process.kill()
                process.wait()

    def wait_for_end(self, role: str, running: list[subprocess.Popen[bytes]]) -> None:
        """Return when these have ended, at their deadline, or at the second signal.

        The deadline is `launch.drain_s` from now, or from the last progress of a checkpoint.
        """
        began, drain_s, warned = time.monotonic(), self.config.launch.drain_s, False
        checkpoints = self.run_dir / "checkpoints" if role == "learner" else None
        progress, deadline = checkpoints and checkpoint.progress(checkpoints), began + drain_s
        while any(process.poll() is None for process in running):
            now, before = time.monotonic(), progress
            if (progress := checkpoints and checkpoint.progress(checkpoints)) != before:
                deadline = now + drain_s
            if len(self.signals) > 1 or now > deadline:
                return
            if now > began + drain_s and not warned:
                warned = True
                log.warning("the learner is still writing its checkpoint; a second signal kills it")
            time.sleep(POLL_S / 2)

    async def buffer_answers(self) -> bool:
        """True if the buffer of this run replies within a moment."""
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
