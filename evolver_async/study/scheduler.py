"""Scheduler of a study's runs: child processes of `evolver-async train`, some at a time.

starts     the next run whose cold start is finished, while fewer than `jobs` run
waits      for children by handle; none outlives this process (`train --parent`)
records    the error of a failed run; the others go on
stops      at the first signal, or at an error of its own: children write their checkpoints and
           end; a second signal ends them at once
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from evolver_async.launch.child import ending
from evolver_async.launch.run_directory import last_lines
from evolver_async.process.stopping import CODES, SIGNALS, handled_by
from evolver_async.runs.watch import runs
from evolver_async.study.directory import (
    OPEN,
    CellRun,
    Study,
    cold_run,
    command_of,
    ended,
    record_failure,
    runs_of,
    state_of,
)

POLL_S = 0.2
STOPPED = CODES | {-number for number in SIGNALS}
SEARCHED_LINES = 5  # of a log, for the error of a failed run


@dataclass
class RunningCell:
    """A child process and the run that it trains."""

    run: CellRun
    process: "subprocess.Popen[bytes]"
    started: float


@dataclass(frozen=True)
class EndedRun:
    """End of a run: finished, failed with its error, or stopped; `seconds` of this launch."""

    run: CellRun
    state: str
    error: str
    seconds: float


class Scheduler:
    """Runs of a study that are not finished, `jobs` at a time.

    `report` is called after every end of a run, with the number of runs that are left.
    """

    def __init__(self, study: Study, jobs: int, report: Callable[[EndedRun, int], None]) -> None:
        self.study = study
        self.jobs = jobs
        self.report = report
        self.signals: list[int] = []
        self.forwarded = 0  # signals that the children have got
        self.children: list[RunningCell] = []
        self.stopped: set[str] = set()  # runs that were stopped from outside

    def run(self) -> bool:
        """Run everything that is left; return False if a signal stopped it."""
        with handled_by(self.signals.append):
            try:
                self._work()
            finally:
                self._end()
        return not self.signals

    def _work(self) -> None:
        while True:
            self._collect()
            self._forward()
            if not self.signals:
                self._start_next()
            if not self.children:
                return
            time.sleep(POLL_S)

    def _forward(self) -> None:
        """Send the children the signals that came since the last call."""
        if len(self.signals) > self.forwarded:
            self.forwarded = len(self.signals)
            for child in self.children:
                child.process.send_signal(signal.SIGINT)

    def _end(self) -> None:
        """Stop the children that an error has left, as a first signal does."""
        if self.children and not self.signals:
            self.signals.append(signal.SIGINT)
        while self.children:
            self._forward()
            self.children = [one for one in self.children if one.process.poll() is None]
            time.sleep(POLL_S)

    def left(self) -> list[CellRun]:
        """Return the runs that are neither finished nor failed, running ones too."""
        return [run for run in runs_of(self.study) if state_of(self.study, run)[0] in OPEN]

    def _start_next(self) -> None:
        """Start runs until `jobs` of them run or none is ready."""
        running = {child.run.name for child in self.children}
        if len(running) >= self.jobs:
            return
        for run in self.ready():
            if len(self.children) >= self.jobs:
                return
            if run.name not in running:
                running.add(run.name)
                self.children.append(self._start(run))

    def ready(self) -> Sequence[CellRun]:
        """Return runs that can start: in place of one without its cold start, the cold start."""
        ready = {}
        for run in self.left():
            if run.name in self.stopped:
                continue
            if self.study.definition.cold_start and not (run.directory / "config.yaml").exists():
                cold = cold_run(self.study, run.seed)
                if state_of(self.study, cold)[0] in OPEN:
                    if cold.name not in self.stopped:
                        ready[cold.name] = cold
                    continue
            ready[run.name] = run
        return list(ready.values())

    def _start(self, run: CellRun) -> RunningCell:
        log = log_file(self.study.out, run)
        log.parent.mkdir(exist_ok=True)
        variables = {"OMP_NUM_THREADS": "1"} if self.jobs > 1 else {}
        arguments = [*command_of(self.study, run), "--parent", str(os.getpid())]
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "evolver_async.cli", *arguments],
                start_new_session=True,  # Ctrl-C reaches this process alone
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
            )
        return RunningCell(run, process, time.monotonic())

    def _collect(self) -> None:
        """Record the runs that have ended."""
        for child in list(self.children):
            code = child.process.poll()
            if code is None:
                continue
            self.children.remove(child)
            run, seconds = child.run, time.monotonic() - child.started
            state, error = ("finished", "") if code == 0 else ("failed", "")
            if code == 0 and ended(run.directory)[0] != "finished":
                runs.end(run.directory, 0)  # it was complete, but its end was not recorded
            if code in STOPPED:
                state = "stopped"
                self.stopped.add(run.name)
            elif code != 0:
                error = self._error(run, code)
                record_failure(self.study.out, run.name, error)
            self.report(EndedRun(run, state, error, seconds), len(self.left()))

    def _error(self, run: CellRun, code: int) -> str:
        """Return the recorded reason of a failure, else the last line of the log."""
        state, reason = ended(run.directory)
        last = last_lines(log_file(self.study.out, run), SEARCHED_LINES).splitlines()
        lines = [line.strip(" |+-") for line in last if line.strip(" |+-")]
        cause = reason if state == "failed" else "".join(lines[-1:])
        if cause.startswith("ExceptionGroup") and lines:
            cause = lines[-1]  # the exception in the group
        how = f"train {ending(code)}"
        return f"{how}: {cause.removeprefix('evolver-async: ')}" if cause else how


def forget_failures(study: Study) -> None:
    """Let failed runs, cold starts included, be tried again."""
    for run in (*map(partial(cold_run, study), study.definition.seeds), *runs_of(study)):
        record_failure(study.out, run.name, None)
        if ended(run.directory)[0] == "failed":
            runs.end(run.directory, 128 + signal.SIGINT)  # as if it had been stopped


def log_file(out: Path, run: CellRun) -> Path:
    """Return the file with the output of a run's `train`."""
    return out / "logs" / f"{run.name}.log"
