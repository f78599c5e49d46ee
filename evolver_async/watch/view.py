"""The live view of a run: a panel on a terminal, else lines, fed from metrics.jsonl.

It follows the file, so it works the same inside the launcher and attached to a running job. The
buffer is asked for failures, and while no new step comes also for who waits for what.
"""

import asyncio
import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from evolver_async.config import Config
from evolver_async.launch.run_directory import EXACT
from evolver_async.metrics.lineages import Mark, current_rows, mark, supersedes
from evolver_async.metrics.tail import Tail
from evolver_async.metrics.wandb_process import url_of
from evolver_async.process.addresses import keys_of
from evolver_async.protocol.messages import StatusRequest
from evolver_async.schema import FailureTotal
from evolver_async.transport.client import Rejected
from evolver_async.transport.dealer import DealerClient

POLL_S = 0.5
ASK_S = 2.0  # between two questions to the buffer
QUIET_S = 5.0  # without a new row, what is going on is shown
REPEAT_S = 30.0  # until a failure that goes on is printed again
SHOWN = 4  # failures, and processes that wait, in a panel
LINE_S = 2.0  # of the run's time between two lines
BARS = "▁▂▃▄▅▆▇█"
SPARKS = 40


class View:
    """What is known of a run from its rows. `steps`: learner steps of all stages, 0 = unknown.

    `exact`: the success of the `random` and of the `optimal` policy on the evaluation's tasks.
    """

    def __init__(self, name: str, steps: int, exact: dict[str, float] | None = None) -> None:
        self.name = name
        self.steps = steps
        self.exact = exact
        self.row: dict[str, Any] = {}
        self.marked: list[tuple[Mark, float]] = []  # evaluations, none superseded
        self.stalled = ""  # who has made no progress for longest
        self.waiting: list[str] = []
        self.url: str | None = None  # of the run at W&B
        self.failures: list[FailureTotal] = []  # the newest first
        self._printed: dict[tuple[str, str], tuple[int, float]] = {}  # count and time, by thing
        self.line_due_s = 0.0
        self.first: tuple[int, float] | None = None

    def feed(self, row: dict[str, Any]) -> str | None:
        """Take in a row; returns the line to print for it, where it deserves one."""
        new = mark(row)
        self.marked = [entry for entry in self.marked if not supersedes(new, entry[0])]
        if "eval/success" in row:
            self.marked.append((new, row["eval/success"]))
            return (
                f"step {row['step']}  eval success {_number(row['eval/success'])}"
                f" over {_number(row.get('eval/episodes'))} episodes{self._beside()}"
            )
        if "time_s" not in row:
            return None
        if self.row and self.row["lineage"] != row["lineage"]:  # its clock went back
            self.first, self.line_due_s = None, 0.0
        self.row, self.waiting = row, []
        if not self.stalls:
            self.stalled = ""
        self.first = self.first or (row["step"], row["time_s"])
        if row["time_s"] < self.line_due_s:
            return None
        self.line_due_s = row["time_s"] + LINE_S
        return self.line()

    @property
    def evals(self) -> list[float]:
        """The success rates of the newest lineage's evaluations."""
        return [success for _, success in self.marked]

    @property
    def stalls(self) -> int:
        """How many stalls the newest step knows of."""
        return int(self.row.get("supervision/stalled") or 0)

    def line(self) -> str:
        """The newest step in one line."""
        return "  ".join(f"{name} {value}" for name, value in self._cells())

    def feed_status(self, status: dict[str, Any]) -> None:
        """Who makes no progress and who waits for what, from the buffer's STATUS."""
        self.stalled = longest_stall(status)
        self.waiting = [
            f"{name} waits {wait['for_s']:.0f} s: {wait['reason']}"
            for name, waits in status["waiting"].items()
            for wait in waits.values()
        ]

    def feed_failures(self, status: dict[str, Any], now: float) -> list[str]:
        """Take in the failures of the buffer's STATUS; returns the lines to print for them.

        One that is new gets a line, one that goes on every REPEAT_S.
        """
        self.failures = failures_of(status)
        lines = []
        for failure in reversed(self.failures):
            thing = (failure.kind, failure.name)
            count, at = self._printed.get(thing, (0, -math.inf))
            if failure.count > count and now - at >= REPEAT_S:
                self._printed[thing] = (failure.count, now)
                lines.append(str(failure))
        return lines

    def panel(self) -> Panel:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        for name, value in self._cells() or [("waiting", "for the first step")]:
            grid.add_row(name, value)
        if self.evals:
            spark = "".join(BARS[round(v * (len(BARS) - 1))] for v in self.evals[-SPARKS:])
            grid.add_row("eval success", f"{spark} {self.evals[-1]:.3f}{self._beside()}")
        if self.url:
            grid.add_row("W&B", self.url)
        if self.stalled:
            grid.add_row("stalled", self.stalled)
        for failure in self.failures[:SHOWN]:
            grid.add_row("failures", Text(str(failure), "red"))
        for text in self.waiting[:SHOWN]:
            grid.add_row("", text)
        return Panel(grid, title=self.name, border_style="cyan", expand=False)

    def _cells(self) -> list[tuple[str, str]]:
        """The newest step as names and texts; values the row lacks are left out."""
        if not self.row:
            return []
        total = f"/{self.steps}" if self.steps else ""
        stage = self.row.get("stage_kind", "")
        cells = [("step", f"{self.row['step']}{total} {stage}".strip())]
        for name, pattern in (
            ("success", "{train/success}"),
            ("reward", "{train/reward_mean} ± {train/reward_std}"),
            ("staleness", "{staleness/mean} (max {staleness/max})"),
            ("ess", "{offpolicy/ess}"),
            ("tokens/s", "{throughput/tokens_per_s}"),
            ("groups/s", "{throughput/groups_per_s}"),
            ("buffer", "{buffer/ready} ready, {buffer/open} open"),
        ):
            with contextlib.suppress(KeyError):
                cells.append((name, pattern.format_map(_Numbers(self.row))))
        wait_s, train_s = self.row.get("time/wait_s"), self.row.get("time/train_s")
        if wait_s is not None and train_s:
            cells.append(("waiting", f"{wait_s / (wait_s + train_s):.0%}"))
        if self.stalls:
            longest_s = self.row["supervision/longest_s"]
            cells.append(("stalled", f"{self.stalls} (longest {longest_s:.0f} s)"))
        cells.append(("time", _clock(self.row["time_s"])))
        eta_s = self._eta_s()
        if eta_s is not None:
            cells.append(("eta", _clock(eta_s)))
        return cells

    def _eta_s(self) -> float | None:
        """Seconds to go at the pace seen so far."""
        if self.first is None or not self.steps:
            return None
        steps, seconds = self.row["step"] - self.first[0], self.row["time_s"] - self.first[1]
        return (self.steps - self.row["step"]) * seconds / steps if steps > 0 else None

    def _beside(self) -> str:
        if self.exact is None:
            return ""
        return " (random policy {random:.3f}, optimal {optimal:.3f})".format_map(self.exact)


class _Numbers(dict[str, Any]):
    """Formats every number of a row the same way."""

    def __getitem__(self, name: str) -> str:
        return _number(super().__getitem__(name))


@contextlib.contextmanager
def shown(run_dir: Path, config: Config, mode: str) -> Iterator[None]:
    """Show the run while the block runs. `mode`: auto, panel, lines or none."""
    if mode == "none":
        yield
        return
    stop = threading.Event()
    console = Console()
    live = None
    if mode == "panel" or (mode == "auto" and console.is_terminal):
        live = Live(console=console, refresh_per_second=4, transient=False)
        live.start()
    thread = threading.Thread(
        target=_show, args=(run_dir, config, live, stop, True), name="watch", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if live is not None:
            live.stop()


def watch(run_dir: Path, config: Config, follow: bool) -> None:
    """Show a run from its beginning; with `follow` until interrupted."""
    stop = threading.Event()
    if not follow:
        stop.set()
    console = Console()
    live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
    with live or contextlib.nullcontext():
        _show(run_dir, config, live, stop, False)


def _show(
    run_dir: Path, config: Config, live: Live | None, stop: threading.Event, embedded: bool
) -> None:
    """Follow the metrics until `stop`, and once more after it."""
    tail = Tail(run_dir / "metrics.jsonl")
    measured = run_dir / EXACT
    exact = json.loads(measured.read_text()) if measured.exists() else None
    view = View(run_dir.name, _steps(config), exact)
    if embedded:
        for row in current_rows(tail.rows()):  # of the launches before
            view.feed(row)
    quiet_since = asked = time.monotonic()
    last = False
    while not last:
        last = stop.wait(POLL_S)
        if view.url is None and (url := url_of(run_dir)) is not None:
            view.url = url
            if live is None:
                print(f"W&B: {url}", flush=True)
        for row in current_rows(tail.rows()):
            line = view.feed(row)
            if not view.stalls:  # else the buffer knows who it is
                quiet_since = time.monotonic()
            if line and live is None:
                print(line, flush=True)
        if not last and config.launch.kind == "local" and time.monotonic() - asked > ASK_S:
            lines = []
            with contextlib.suppress(OSError, TimeoutError, ValueError, Rejected):
                address = json.loads((run_dir / "run.json").read_text())["address"]
                status = asyncio.run(ask(address, keys_of(config)))
                lines = view.feed_failures(status, time.monotonic())
                if time.monotonic() - quiet_since > QUIET_S:
                    quiet_since = time.monotonic()
                    view.feed_status(status)
                    lines += filter(None, (view.stalled, *view.waiting))
            asked = time.monotonic()
            if live is None:
                for text in lines:
                    print(text, file=sys.stderr, flush=True)
        if live is not None:
            live.update(view.panel())
        elif last and view.row:
            print(view.line(), flush=True)


def longest_stall(status: dict[str, Any]) -> str:
    """Who has made no progress for longest and why, from STATUS; empty where everybody moves."""
    for stall in status["stalled"][:1]:
        return f"{stall['who']} stands still for {stall['for_s']:.0f} s: {stall['what']}"
    return ""


def failures_of(status: dict[str, Any]) -> list[FailureTotal]:
    """What fails, from STATUS, the newest first."""
    names = FailureTotal.__struct_fields__
    return [FailureTotal(**{name: one[name] for name in names}) for one in status["failures"]]


async def ask(address: str, keys: Path | None = None, timeout_s: float = 2.0) -> dict[str, Any]:
    """The buffer's STATUS. TimeoutError when nobody answers at `address`, Rejected when not us."""
    client = DealerClient(address, "", f"watch-{os.getpid()}", keys=keys)
    try:
        return (await client.request(StatusRequest(), timeout_s=timeout_s)).status
    finally:
        client.close()


def _steps(config: Config) -> int:
    """All learner steps; 0 when some stage has another limit alone."""
    steps = [stage.steps for stage in config.stages]
    return sum(steps) if all(steps) else 0


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
