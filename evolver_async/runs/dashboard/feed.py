"""Facts about a run for the views: its rows, its end, the buffer's STATUS, and its logs.

Files are read in a thread, so that the interface never waits for them; the snapshot is replaced in
the event loop alone.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evolver_async.config import Config, ConfigError
from evolver_async.launch.run_directory import address_of, last_lines, pause_notice
from evolver_async.metrics.newest_lineage import current_rows, key_of
from evolver_async.metrics.replies import SavedReply, files_in, load
from evolver_async.metrics.tail import Tail
from evolver_async.process.rendezvous import keys_of
from evolver_async.runs.results.events import RunEvent, events, restarts_logged
from evolver_async.runs.results.final_ledger import NoLedger, final_ledger
from evolver_async.runs.results.table import MetricTable
from evolver_async.runs.watch.live import exact_values, steps_of
from evolver_async.runs.watch.runs import END, Ending, best_of, digests, ending_of, evaluations
from evolver_async.runs.watch.status_text import ask
from evolver_async.runs.watch.throughput import Setup
from evolver_async.runs.watch.view import View
from evolver_async.terminal import plain
from evolver_async.wire.client import Rejected

ASK_S = 2.0  # for an answer to STATUS
SEARCHED_LINES = 100  # of a log, for its last warning
LOGGED = re.compile(r"^(\d\S+)\.\d+Z (?:WARNING|ERROR|CRITICAL) [\w.]+: (.*)$")

Status = dict[str, Any]


@dataclass(frozen=True)
class LoggedError:
    """The last warning or error in the log of a process, "" if the log has none."""

    process: str
    when: str
    text: str


@dataclass(frozen=True)
class RunSnapshot:
    """Everything that the views show of a run at one moment.

    `best`: the best success of the evaluations like the last one, None without any. `cells`: names
    and texts of the newest step. `times`: those of the processes' time, with the advice. `present`:
    those of the step under way. `status`: the newest answer to STATUS, None without one. `silence`:
    the reason why the buffer gives no answer now, "" if it gives one. `ended`: the groups by state
    and the ledger of a run that has ended, None if they are not known; `unknown` says why.
    `errors`: of the logs of a run that has ended. `replies`: those of the newest saved evaluation,
    the file `replies_of`; [] without any, or if `unread` says why they cannot be read.
    """

    name: str
    end: Ending
    steps: MetricTable
    evaluations: MetricTable
    best: float | None = None
    events: list[RunEvent] = field(default_factory=list)
    cells: list[tuple[str, str]] = field(default_factory=list)
    times: list[tuple[str, str]] = field(default_factory=list)
    present: list[tuple[str, str]] = field(default_factory=list)
    paused: str = ""
    problem: str = ""
    status: Status | None = None
    silence: str = ""
    ended: tuple[dict[str, int], dict[str, Any]] | None = None
    unknown: str = ""
    errors: list[LoggedError] = field(default_factory=list)
    replies: list[SavedReply] = field(default_factory=list)
    replies_of: str = ""
    unread: str = ""

    @property
    def live(self) -> bool:
        return self.end.state == "running"


class RunFeed:
    """Reader of one run. `asking` awaits the buffer's STATUS, None for a run without a buffer."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        asking: Callable[[], Awaitable[Status]] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.config = config
        self._asking = asking or (None if config.launch.kind == "serial" else self._ask_buffer)
        self._tail = Tail(run_dir / "metrics.jsonl")
        self._rows: list[dict[str, Any]] = []
        self._restarts: list[RunEvent] = []
        self._log_size = -1
        self._newest: tuple[Path, int] | None = None  # saved evaluation, and its time
        self._digest_of = digests(config)
        setups = Setup.by_stage(config)
        steps = steps_of(config, run_dir)
        self._view = View(run_dir.name, steps, exact_values(run_dir), setups)
        self._seen: tuple[float, ...] = ()
        self._looked_back = False
        self._answered: float | None = None  # time of the newest answer
        self._steps = self._evaluations = MetricTable([])
        tables = self._steps, self._evaluations
        self.snapshot = RunSnapshot(run_dir.name, ending_of(run_dir), *tables)

    async def read(self) -> None:
        """Read what the files have gained."""
        changes = await asyncio.to_thread(self._read)
        self.snapshot = replace(self.snapshot, **changes)
        if self.snapshot.live:
            self._looked_back = False

    async def look_back(self) -> None:
        """Read the ledger and the logs of a run that has ended, once."""
        if self.snapshot.live or self._looked_back:
            return
        self._looked_back = True
        changes = await asyncio.to_thread(self._look_back)
        self.snapshot = replace(self.snapshot, **changes)

    def _read(self) -> dict[str, Any]:
        rows, changes = self._tail.rows(), dict[str, Any]()
        if lost := self._tail.unreadable:
            changes["problem"] = f"metrics.jsonl: some of it is not readable: {lost} lines"
        restarted = self._read_log()
        if rows or restarted:
            changes |= self._add(rows)
        changes["end"] = self._ending()
        changes["paused"] = plain(pause_notice(self.run_dir) or "")
        return changes | self._read_replies()

    def _read_replies(self) -> dict[str, Any]:
        """Read the newest saved evaluation if there is another one; return what has changed."""
        newest = next(iter(files_in(self.run_dir).items()), None)
        if newest == self._newest:
            return {}
        self._newest = newest
        if newest is None:
            return {"replies": [], "replies_of": "", "unread": ""}
        path, _ = newest
        try:
            return {"replies": load(path), "replies_of": path.name, "unread": ""}
        except ConfigError as error:
            error_text = plain(str(error).replace(str(path), path.name))
            return {"replies": [], "replies_of": path.name, "unread": error_text}

    def _look_back(self) -> dict[str, Any]:
        ended, unknown = None, ""
        try:
            ended = final_ledger(self.run_dir, self.config)
        except NoLedger as error:
            unknown = str(error)
        errors = [_logged(path) for path in sorted((self.run_dir / "logs").glob("*.log"))]
        found = {"ended": ended, "unknown": unknown, "errors": errors}
        return {**found, "status": None, "silence": ""}

    async def ask(self) -> None:
        """Ask a running buffer for its STATUS."""
        if not self.snapshot.live:
            return
        if self._asking is None:
            silence = "the run has no buffer process (launch.kind=serial), so there is no STATUS"
            self.snapshot = replace(self.snapshot, silence=silence)
            return
        try:
            status = await self._asking()
        except (OSError, TimeoutError, ValueError, ConfigError, Rejected) as error:
            self.snapshot = replace(self.snapshot, silence=self._silence(error))
            return
        self._answered = time.monotonic()
        self._view.status = status
        changes: dict[str, Any] = {"status": status, "present": self._view.step_cells()}
        self.snapshot = replace(self.snapshot, silence="", ended=None, **changes)

    async def _ask_buffer(self) -> Status:
        return await ask(address_of(self.run_dir), keys_of(self.config), ASK_S)

    def _silence(self, error: Exception) -> str:
        cause = "" if isinstance(error, TimeoutError) else f": {plain(str(error))}"
        if self._answered is None:
            return f"the buffer does not answer STATUS{cause}"
        since_s = time.monotonic() - self._answered
        return f"the buffer has not answered for {since_s:.0f} s{cause}; its numbers are from then"

    def _add(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Add rows; return the changes of the snapshot."""
        self._rows += rows
        for row in current_rows(rows):
            self._view.feed(row)
        takes = _of_kind("take", rows)
        if self._steps.rows and all(t["lineage"] == self._steps.rows[-1]["lineage"] for t in takes):
            self._steps = self._steps.extended(takes)
            known = current_rows([*self._evaluations.rows, *_of_kind("eval", rows)])
        else:  # the run has gone back to an earlier step, or this is the first look at it
            known = current_rows(self._rows)
            self._steps = MetricTable(_of_kind("take", known))
        self._evaluations = MetricTable(_of_kind("eval", known))
        evaluated = evaluations(self._evaluations)
        return {
            "best": best_of(evaluated, self._digest_of)["eval/success"] if evaluated else None,
            "steps": self._steps,
            "evaluations": self._evaluations,
            "events": [*events(self._rows, self._steps), *self._restarts],
            "cells": self._view.cells(),
            "times": self._view.time_cells(),
        }

    def _read_log(self) -> bool:
        """Read the launcher's log if it has grown; True if it names a new restart."""
        path = self.run_dir / "logs" / "launcher.log"
        size = path.stat().st_size if path.exists() else 0
        if size == self._log_size:
            return False
        self._log_size = size
        found = restarts_logged(path.read_text(errors="replace")) if size else []
        new = found != self._restarts
        self._restarts = found
        return new

    def _ending(self) -> Ending:
        """Return the state of the run.

        The lock of a run that is not running is looked at again only after its files have changed:
        a look takes the lock for a moment, and a launch could meet it.
        """
        names = (END, "run.json", "lock", "metrics.jsonl")
        paths = [self.run_dir / name for name in names]
        seen = tuple(path.stat().st_mtime if path.exists() else 0.0 for path in paths)
        if self.snapshot.live or seen != self._seen:
            self._seen = seen
            return ending_of(self.run_dir)
        return self.snapshot.end


def _of_kind(kind: str, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a kind by step."""
    return sorted((row for row in rows if key_of(row).kind == kind), key=lambda row: row["step"])


def _logged(path: Path) -> LoggedError:
    matches = [LOGGED.match(line) for line in last_lines(path, SEARCHED_LINES).splitlines()]
    last = next((one for one in reversed(matches) if one), None)
    return LoggedError(path.stem, f"{last[1]}Z" if last else "", plain(last[2]) if last else "")
