"""The supervisor of a launch: a buffer, a learner and actors, wherever a spawner starts them.

    starts     buffer → (answers STATUS) → experience, learner, actors
    supervises by handle; a process that ends is restarted under a new incarnation, within its
               budget; beyond it the run ends, or continues unguided without the experience service
    scales     the actors, as `ActorScaling` wants; one that leaves returns its tickets
    ends       when the learner is done, on a signal, or when a process cannot be kept alive: the
               learner first (it writes a checkpoint), then actors, then services; each is killed
               after `launch.drain_s`, or at once at the second signal; a learner that computes or
               writes has `launch.drain_s` from its last progress

Launchers differ in their spawner alone.
"""

import asyncio
import logging
import math
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from evolver_async.buffer.monitor.stalls import ALERT_PAUSE_S, LIFE
from evolver_async.checkpoint import checkpoints as checkpoint
from evolver_async.config import Config
from evolver_async.errors import DISK_FAILED, DISK_FULL, EVALUATION_LOST, UNPLACED, USER_ERROR
from evolver_async.launch.child import (
    CRASHED,
    FINAL,
    Child,
    FailedStart,
    Handle,
    Spawner,
    Unreachable,
    ending,
)
from evolver_async.launch.run_directory import announce
from evolver_async.launch.scaling import ActorScaling
from evolver_async.metrics.alerts import alert
from evolver_async.process.setup import INCARNATIONS
from evolver_async.process.stopping import NodeDrained, handled_by
from evolver_async.wire.client import Rejected
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.messages import StatusRequest

POLL_S = 0.1
SILENT_S = 60.0  # between two warnings of a silent buffer, doubled each time
SILENT_LIMIT_S = 960.0
STANDSTILL_S = 60.0  # between two questions, past which this process itself was stopped
BUSY_S = 0.2  # of a processor between two questions: a buffer that computes does not hang
PLACE_S = 15.0  # for a learner's place, until another actor makes room for it
ROOM_S = 2.0  # between two looks at the disks
FULL_BYTES = 1 << 16  # of a disk with so little room nothing useful can be written
OUTAGE_S = 60.0  # in which all failures of the disk under a process use one restart of its budget
FULL_PAUSE_S = 5.0  # until a process that found no room is started again
WAITING = (DISK_FULL, UNPLACED)  # exit codes after which a process is started as often as needed
HURRY_S = 3.0  # for a role to end where all of its processes are about to be killed
LATE_S = 2.0  # for an answer of the buffer while the run goes on
LONGEST_STEPS = 3  # a stopped learner may compute for so many of its longest steps
STILL_S = 10.0  # without a sign of work, several beats
COMPUTES_S = 300.0  # at least, as its longest step may not be known yet
LOOK_S = 2.0  # between two questions for the computations of a stopped learner
START_S = 60.0  # from its process on, until the buffer must answer

log = logging.getLogger(__name__)


def is_full(directory: Path) -> bool:
    """Return True if a disk has no room for this user: no bytes, or no further files."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < FULL_BYTES or (disk.f_files > 0 and not disk.f_favail)


class RunFailed(Exception):
    """The run cannot continue; `code` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Supervisor:
    """Supervisor of the children of one launch, which `spawner` starts."""

    def __init__(self, config: Config, run_dir: Path, spawner: Spawner) -> None:
        self.config = config
        self.run_dir = run_dir
        self.spawner = spawner
        self.children: list[Child] = []
        self.signals: list[int] = []
        self.drained = ""  # the child whose node is drained and that has no other: the run ends
        self.hurries = False  # only the learner may take its time to end
        self.room_due = 0.0  # time at which the next actor makes room for a learner
        # Higher than those of all earlier launches: a process of one that still runs is fenced.
        self.first_incarnation = announce(run_dir, spawner.address) * INCARNATIONS
        self.scaling = ActorScaling(config, run_dir)
        self.incarnations: dict[str, int] = {}  # the newest of every name
        self.answered = self.asked = 0.0  # times of the buffer's last answer and of the last look
        self.silent_due = 0.0  # time of the next warning of its silence
        self.silent_pause_s = SILENT_S
        self.alerted = -math.inf  # time of the last alert of that
        self.hung: dict[str, int] = {}  # incarnations of those found hung at the last look
        self.buffer_work = 0, 0.0  # pid of the buffer, and its processor seconds at the last look
        self.disks = [run_dir]
        if config.weights.kind in ("auto", "shm") and not config.weights.address:
            self.disks.append(Path(config.weights.dir))
        self.measured = self.full_due = 0.0  # times of the last look, and of the next warning
        self.full_pause_s = SILENT_S

    def run(self) -> int:
        """Run to the end; return 0, 128 + the signal that ended it, or the code of a failure.

        A signal does not end a run whose learner has finished. Raises NodeDrained.
        """
        with handled_by(self.signals.append):
            try:
                self.start()
                self.watch()
            except RunFailed as failure:
                log.error("%s", failure)
                return failure.code
            except Unreachable as error:
                log.error("%s", error)
                self.hurries = True
                return CRASHED
            finally:
                self.end()
        if self.finished():
            return 0
        if self.drained and not self.signals:
            raise NodeDrained(self.drained)
        return 128 + (self.signals[0] if self.signals else signal.SIGTERM)

    def start(self) -> None:
        """Start the buffer, and the other processes once it answers. Raises RunFailed."""
        buffer = self.add("buffer", "buffer")
        deadline = time.monotonic() + START_S
        while not self.signals and not asyncio.run(self.buffer_answers()):
            code = buffer.poll()
            if code is not None and (code < 0 or isinstance(buffer.process, FailedStart)):
                self.supervise(buffer, time.monotonic())  # it was killed, or there was no room
            elif code is not None:
                cause = self.spawner.last_line(buffer)
                raise RunFailed(f"the buffer did not start: {cause}", USER_ERROR)
            if not buffer.process.pid:  # it waits for its place: see `Handle`
                deadline = time.monotonic() + START_S
            elif time.monotonic() > deadline:
                raise RunFailed(
                    f"the buffer does not answer at {self.spawner.address} within {START_S:.0f} s,"
                    f" see {self.spawner.log_file('buffer')}",
                    1,
                )
        if self.signals:
            return
        if self.config.experience.pooled:
            self.add("experience", "experience")
        self.add("learner", "learner")
        self.scale(time.monotonic())

    def watch(self) -> None:
        """Return when the learner has finished, or the run is to end. Raises RunFailed."""
        self.answered = self.asked = time.monotonic()
        while not (self.signals or self.drained):
            if self.finished():
                return
            if self.spawner.answers():
                for child in list(self.children):
                    self.supervise(child, time.monotonic())
                self.scale(time.monotonic())
            self.ask_buffer(time.monotonic())
            self.check_room(time.monotonic())
            time.sleep(POLL_S)

    def ask_buffer(self, now: float) -> None:
        """Say if the buffer has not answered for `buffer.warn_s`, and again after growing pauses.

        Nothing else reports a stopped buffer: stalls are reported by the buffer itself.
        """
        warn_s = self.config.buffer.warn_s
        if now - self.asked < max(1.0, warn_s / 5):
            return
        if now - self.asked > STANDSTILL_S:  # this process, or its host, stood still, too
            self.answered, self.hung = now, {}
        self.asked = now
        silent_s = now - self.answered
        try:
            status = asyncio.run(self.status(LATE_S))
        except RunFailed:  # it refuses, so it lives
            status = {"stalled": []}
        if status is not None:
            if silent_s > warn_s:
                log.warning("the buffer answers again after %.0f s", silent_s)
            self.answered, self.silent_due, self.silent_pause_s = now, now, SILENT_S
        self.end_hung(self.lifeless(status, silent_s), now)
        if status is not None:
            return
        if silent_s > warn_s and now >= self.silent_due:
            text = f"the buffer does not answer for {silent_s:.0f} s: stopped, or its disk hangs"
            log.warning("%s", text)
            if self.silent_pause_s == SILENT_S and now - self.alerted > ALERT_PAUSE_S:
                self.alerted = now
                alert(self.run_dir, "stall of buffer", text)
            self.silent_due = now + self.silent_pause_s
            self.silent_pause_s = min(2 * self.silent_pause_s, SILENT_LIMIT_S)

    def lifeless(self, status: dict[str, Any] | None, silent_s: float) -> dict[str, float]:
        """Return the seconds without any sign of life by process; the buffer's if it is silent."""
        if status is not None:
            stalled = status["stalled"]
            return {one["who"]: one["for_s"] for one in stalled if one["about"] == LIFE}
        (buffer,) = (child for child in self.children if child.role == "buffer")
        pid, before = buffer.process.pid, self.buffer_work
        if not isinstance(buffer.process, subprocess.Popen):  # it can be on another host
            return {}
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:  # it has ended
            return {}
        self.buffer_work = pid, times.user + times.system
        if before[0] != pid or self.buffer_work[1] - before[1] > BUSY_S:
            return {}
        return {"buffer": silent_s}

    def end_hung(self, lifeless: dict[str, float], now: float) -> None:
        """Kill processes that have hung for too long, at two looks: they are started again."""
        launch, before = self.config.launch, self.hung
        self.hung = {}
        for child in self.children:
            limit_s = launch.hung_learner_s if child.role == "learner" else launch.hung_s
            for_s = lifeless.get(child.name, 0.0)
            if not limit_s or for_s < limit_s or child.due is not None:
                continue
            self.hung[child.name] = child.incarnation
            if before.get(child.name) == child.incarnation:
                log.warning("%s has hung for %.0f s and is killed", child.name, for_s)
                for process in child.processes:
                    process.kill()

    def check_room(self, now: float) -> None:
        """Say if the disk of the run or of its weights is full, and again after growing pauses.

        The logs and alerts of the processes may be on the same disk.
        """
        if now - self.measured < ROOM_S:
            return
        self.measured = now
        full = [path for path in self.disks if is_full(path)]
        if full and now >= self.full_due:
            names = " and ".join(map(str, full))
            log.warning("the disk of %s is full: the run waits for space", names)
            self.full_due = now + self.full_pause_s
            self.full_pause_s = min(2 * self.full_pause_s, SILENT_LIMIT_S)
        elif not full and self.full_due:
            log.warning("the disk has space again")
            self.full_due, self.full_pause_s = 0.0, SILENT_S

    def finished(self) -> bool:
        """True if the learner is done. A stopped one has another exit code."""
        return any(child.role == "learner" and child.poll() == 0 for child in self.children)

    def scale(self, now: float) -> None:
        """Add actors that are wanted and not there; let those go that are not wanted."""
        present = {child.name: child for child in self.children if child.role == "actor"}
        wanted = [f"actor-{index}" for index in range(self.scaling.wanted(now))]
        if waiting := self.unplaced():
            wanted = self.beside(
                waiting, [present[name] for name in wanted if name in present], now
            )
        else:
            self.room_due = now + PLACE_S
        for name in wanted:
            if name not in present and not self.signals:  # a thousand starts take many seconds
                self.add("actor", name)
        for name in present.keys() - wanted:
            if present[name].leaves_by is None:
                log.info("%s leaves: %d actors are wanted", name, len(wanted))
                present[name].leaves_by = now + self.config.launch.drain_s
                for process in present[name].processes:
                    process.terminate()

    def unplaced(self) -> list[Handle]:
        """Return the processes of the learner that wait for their place."""
        learners = [child for child in self.children if child.role == "learner"]
        waiting = [one for child in learners if child.due is None for one in child.processes]
        return [one for one in waiting if not one.pid and one.poll() is None]

    def beside(self, waiting: list[Handle], actors: list[Child], now: float) -> list[str]:
        """Return the names of the actors that may stay while a learner waits for its place.

        Actors are of no use without it: those without a place leave the queue, and the others make
        room where the learner may run, one after the other.
        """
        placed = [one for one in actors if one.process.pid]
        if now >= self.room_due and not any(one.leaves_by is not None for one in placed):
            hinders = [one for one in placed if self.spawner.hinders(one.process, waiting[0])]
            if hinders:
                log.warning("the learner finds no place: %s makes room for it", hinders[-1].name)
                placed.remove(hinders[-1])
            self.room_due = now + PLACE_S
        return [one.name for one in placed]

    def let_go(self, child: Child, now: float) -> None:
        """Forget an actor that has left. Kill one that takes too long: its leases expire."""
        assert child.leaves_by is not None
        if child.due is not None or child.poll() is not None:
            self.children.remove(child)
        elif now > child.leaves_by:
            log.warning("%s did not leave within launch.drain_s and is killed", child.name)
            child.process.kill()
            child.leaves_by = now + self.config.launch.drain_s

    def supervise(self, child: Child, now: float) -> None:
        """Restart a child that has ended, after its pause and within its budget."""
        if child.leaves_by is not None:
            return self.let_go(child, now)
        code = child.poll()
        if code is None:
            self.move(child)
            return None
        if child.due is not None and now < child.due:
            return None
        if child.moves or any(map(self.spawner.lost, child.processes)):
            if self.is_bound(child):
                place = self.spawner.place_of(child.role)
                raise RunFailed(f"{child.name} is lost with its node, and has no other {place}", 1)
            left = "has left a node that is drained" if child.moves else "is lost with its node"
            log.warning("%s %s, and starts on another", child.name, left)
            return self.restart(child, now)
        if child.due is not None:
            self.restart(child, now)
        elif child.role == "experience" and not self.may_restart(child, code, now):
            text = f"{child.name} {ending(code)} and is not started again; episodes go unguided"
            text += f" from now on: {self.spawner.last_error(child)}"
            log.warning("%s", text)
            alert(self.run_dir, f"crash of {child.name}", text, "ERROR")
            self.children.remove(child)
        elif code == EVALUATION_LOST:
            raise RunFailed(self.spawner.last_error(child), code)
        elif code in FINAL:
            cause = self.spawner.last_error(child)
            raise RunFailed(f"{child.name} cannot go on: {cause}", code)
        else:
            self.plan_restart(child, code, now)

    def move(self, child: Child) -> None:
        """Let a child leave a place that is drained: an actor returns its tickets, a learner saves.

        It is started again elsewhere, and none of its budget is used. The run ends as on SIGTERM if
        the child has no other place. A SIGTERM that comes with the drain is not a second signal.
        """
        if not child.moves and any(self.spawner.moves(process) for process in child.processes):
            child.moves = True
            if self.is_bound(child):
                log.warning(
                    "the node of %s is drained: the run ends and can be resumed", child.name
                )
                # No signal is noted here: the scheduler sends SIGTERM with the drain, and as a
                # second signal it would kill the learner before its checkpoint.
                self.drained = child.name
                return
            for process in child.processes:
                process.terminate()

    def is_bound(self, child: Child) -> bool:
        """True if a child whose place is drained or gone has no other: of a learner's ranks on
        several hosts the first alone is bound to its place."""
        first = child.process
        gone = self.spawner.moves(first) or self.spawner.lost(first)
        return gone and self.spawner.bound(child.role)

    def may_restart(self, child: Child, code: int, now: float) -> bool:
        """True if a child that ended with this code has a restart left in its budget."""
        if now - child.started >= self.config.launch.healthy_s:
            child.restarts = 0
        return (
            code in WAITING
            or self.in_outage(child, code, now)
            or (code not in FINAL and child.restarts < self.config.launch.restarts)
        )

    def in_outage(self, child: Child, code: int, now: float) -> bool:
        """True if a child ended by a failure of its disk, and so did another one of its processes
        shortly before: a device that fails for seconds is one cause."""
        return code == DISK_FAILED and now - child.disk_failed < OUTAGE_S

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
        # disk or cluster are to blame, and none of the budget is used, or no more of it
        if code in WAITING or self.in_outage(child, code, now):
            child.due = now + FULL_PAUSE_S
            log.warning("%s: %s", child.name, self.spawner.last_error(child))
            return
        if code == DISK_FAILED:
            child.disk_failed = now
        pause_s = launch.backoff_s * 2**child.restarts
        child.due = now + pause_s
        child.restarts += 1
        end, cause = f"{child.name} {ending(code)}", self.spawner.last_line(child)
        restart = f"restart {child.restarts} of {launch.restarts} in {pause_s:.1f} s"
        log.warning("%s, %s: %s", end, restart, cause)
        alert(self.run_dir, f"crash of {child.name}", f"{end}, {restart}: {cause}", "ERROR")

    def restart(self, child: Child, now: float) -> None:
        """Start the processes of a child again under the next incarnation."""
        child.due, child.started, child.failed_rank, child.moves = None, now, None, False
        child.incarnation = self.incarnations[child.name] = child.incarnation + 1
        child.process = self.spawner.start(child.role, child.name, child.incarnation)
        child.others = self.spawner.start_others(child.role, child.name, child.incarnation)
        text = f"{child.name} was started again as incarnation {child.incarnation}"
        alert(self.run_dir, f"restart of {child.name}", text, "INFO")

    def add(self, role: str, name: str) -> Child:
        """Start a child and supervise it from now on."""
        incarnation = self.incarnations.get(name, self.first_incarnation - 1) + 1
        self.incarnations[name] = incarnation
        child = Child(role, name, self.spawner.start(role, name, incarnation), incarnation)
        child.others = self.spawner.start_others(role, name, incarnation)
        self.children.append(child)
        return child

    def end(self) -> None:
        """End every child by handle, role after role; each role has its own time."""
        # The order of the data, backwards: the last DONE and the last episodes need a buffer that
        # answers.
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

    def wait_for_end(self, role: str, running: list[Handle]) -> None:
        """Return when these have ended, at their deadline, or at the second signal.

        The deadline is `launch.drain_s` from now, or from the last progress of a learner: of its
        checkpoint, or of its computations, which may take a multiple of its longest step.
        """
        began, drain_s, warned = time.monotonic(), self.config.launch.drain_s, False
        if self.hurries and role != "learner":
            drain_s = min(drain_s, HURRY_S)
        checkpoints = self.run_dir / "checkpoints" if role == "learner" else None
        progress, deadline = checkpoints and checkpoint.progress(checkpoints), began + drain_s
        asked, work = began, ""
        while any(process.poll() is None for process in running):
            now, before = time.monotonic(), progress
            if (progress := checkpoints and checkpoint.progress(checkpoints)) != before:
                deadline, work = now + drain_s, "writing its checkpoint"
            elif checkpoints and now - asked > LOOK_S:
                asked = now
                if found := self.computation(now - began):
                    deadline, work = now + drain_s, found
            if len(self.signals) > 1 or now > deadline:
                return
            if now > began + drain_s and not warned:
                warned = True
                log.warning("the learner is still %s; a second signal kills it", work)
            time.sleep(POLL_S / 2)

    def computation(self, waited_s: float) -> str:
        """Describe what a stopped learner computes; "" if it does not, or does so for too long."""
        try:
            found = (asyncio.run(self.status(LATE_S)) or {}).get("progress")
        except RunFailed:
            return ""
        if found is None or found["still_s"] > STILL_S:
            return ""
        if waited_s > max(COMPUTES_S, LONGEST_STEPS * found["longest_s"]):
            return ""
        return f"computing step {found['step']} ({found['phase']})"

    async def buffer_answers(self, timeout_s: float = 5 * POLL_S) -> bool:
        """True if the buffer of this run replies within a moment."""
        return await self.status(timeout_s) is not None

    async def status(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the buffer's STATUS, None if it does not reply. RunFailed if it refuses."""
        client = DealerClient(
            self.spawner.address, self.run_dir.name, "launcher", keys=self.spawner.keys
        )
        try:
            return (await client.request(StatusRequest(), timeout_s=timeout_s)).status
        except TimeoutError:
            return None
        except Rejected as error:
            raise RunFailed(
                f"buffer.address: {self.spawner.address}: {error}", USER_ERROR
            ) from None
        finally:
            client.close()
