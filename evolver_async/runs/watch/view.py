"""The view of a run: a panel or lines of text, from the rows of its metrics and from STATUS.

Pure but for rich's objects; `live.py` reads the file, asks the buffer and prints.
"""

import bisect
import contextlib
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from evolver_async.durations import clock
from evolver_async.metrics.alarm_rows import firing
from evolver_async.metrics.newest_lineage import RowKey, key_of, supersedes
from evolver_async.runs.watch import throughput
from evolver_async.runs.watch.row_texts import eval_sets_of, mechanisms, number, played, validation
from evolver_async.runs.watch.status_text import failures_of, longest_stall, waits_of
from evolver_async.runs.watch.step_progress import StateLines, Status, first_eta, step_text
from evolver_async.wire.failure_totals import FailureTotal

ExactValues = Mapping[tuple[Any, Any], Mapping[str, float]]  # by stage and episodes

REPEAT_S = 30.0  # until a repeated failure is printed again, doubled each time
REPEAT_LIMIT_S = 960.0
SHOWN = 4  # failures, alerts and waiting processes, of each, in a panel
LINE_S = 2.0  # of the run's time between two lines
BARS = "▁▂▃▄▅▆▇█"
SPARKS = 40
RECENT = 50  # steps whose time the panel divides


class View:
    """State of a run by its rows and by STATUS.

    `steps`: learner steps of all stages, 0 if unknown. `exact`: success of the `random` and of the
    `optimal` policy by the stage and the episodes of an evaluation. `setups`: settings that the
    advice depends on, by stage. `estimate_s`: seconds of a step as estimated before the start, 0 if
    they were not.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        exact: ExactValues | None = None,
        setups: Sequence[throughput.Setup] = (),
        estimate_s: float = 0.0,
    ) -> None:
        self.name = name
        self.steps = steps
        self.exact = exact or {}
        self.setups = setups or [throughput.Setup()]
        self.estimate_s = estimate_s
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.row: dict[str, Any] = {}
        self.evaluations: list[tuple[RowKey, dict[str, Any]]] = []  # by step, none superseded
        self.eval_sets: dict[str, tuple[RowKey, str]] = {}  # newest of each, none superseded
        self.validated = ""  # newest figures of rows that never train
        self.stalled = ""  # the longest stall
        self.waiting: list[str] = []
        self.status: Status | None = None  # the newest
        self.states = StateLines(steps)
        self.silent_s: float | None = None  # seconds since the buffer's last answer, if it is late
        self.url: str | None = None  # page at W&B
        self.alarms: dict[str, RowKey] = {}  # that fire, and the row in which they began
        self.failures: list[FailureTotal] = []  # the newest first
        self.alerts: list[str] = []  # that nothing else tells, the newest first
        # count, time of the next line and the pause after that, by kind and name
        self._printed: dict[tuple[str, str], tuple[int, float, float]] = {}
        self.line_due_s = 0.0
        self.first: tuple[int, float] | None = None

    def feed(self, row: dict[str, Any]) -> str | None:
        """Add a row. Return the line to print for it, None if it needs none."""
        new = key_of(row)
        self._leave(new)
        if "eval/success" in row:
            for name, value in eval_sets_of(row):
                if name not in self.eval_sets or new.step >= self.eval_sets[name][0].step:
                    self.eval_sets[name] = new, value
            bisect.insort(self.evaluations, (new, row), key=_step)  # an earlier one can end later
            return (
                f"step {row['step']}  eval success {number(row['eval/success'])}"
                f" over {played(row)}{self._exact_values(row)}"
                f"{''.join(f'; {name} {value}' for name, value in eval_sets_of(row))}"
            )
        if text := validation(row):
            self.validated = f"{text} at step {new.step}"
        if new.kind != "take":
            return f"step {new.step}  validation {text}" if text else None
        if self.row and self.row["lineage"] != row["lineage"]:  # a resume sets the clock back
            self.first, self.line_due_s = None, 0.0
            self.recent.clear()
        self.row, self.waiting = row, []
        self.recent.append(row)
        if not self.stalls:
            self.stalled = ""
        self.first = self.first or (row["step"], row["time_s"])
        if row["time_s"] < self.line_due_s and not text:
            return None
        self.line_due_s = row["time_s"] + LINE_S
        return self.line()

    def _leave(self, new: RowKey) -> None:
        """Drop the evaluations that a row supersedes; sets show the newest of those before.

        No row supersedes one of a smaller step, and only a step supersedes those of larger ones.
        """
        begin = bisect.bisect_left(self.evaluations, new.step, key=_step)
        end = bisect.bisect_right(self.evaluations, new.step, begin, key=_step)
        place = slice(begin, None if new.kind == "take" else end)
        compared = self.evaluations[place]
        kept = [one for one in compared if not supersedes(new, one[0])]
        if len(kept) < len(compared):
            self.evaluations[place] = kept
            sets = ((key, *one) for key, row in self.evaluations for one in eval_sets_of(row))
            self.eval_sets = {name: (key, text) for key, name, text in sets}

    @property
    def evals(self) -> list[float]:
        """Success rates of the newest lineage's evaluations."""
        return [row["eval/success"] for _, row in self.evaluations]

    @property
    def stalls(self) -> int:
        """Number of stalls that the newest step reports."""
        return int(self.row.get("supervision/stalled") or 0)

    def line(self) -> str:
        """Format the newest step as one line."""
        return "  ".join(f"{name} {value}" for name, value in self.cells())

    def feed_status(self, status: Status, now: float, *, quiet: bool = True) -> list[str]:
        """Add the buffer's STATUS. Return the lines to print for it.

        `quiet`: no row has come for a while, so that stalls and waiting processes are shown.
        """
        self.status = status
        if quiet:
            self.stalled, self.waiting = longest_stall(status), waits_of(status)
        return self.states.feed(status, self.first_eta(), now)

    def first_eta(self) -> str:
        """Estimate the run's time to go in its first step; "" once two rows tell it."""
        if self.status is None or self._eta_s() is not None:
            return ""
        progress = self.status["progress"]
        setup = self.setups[min(self.status["stage"], len(self.setups) - 1)]
        apart = setup.staleness > 0
        return first_eta(progress, self.steps, apart=apart, estimate_s=self.estimate_s)

    def step_cells(self) -> list[tuple[str, str]]:
        """Format the present step, and the estimate of the run's time in its first step."""
        if self.status is None:
            return []
        cells = [("this step", step_text(self.status)), ("eta", self.first_eta())]
        return [(name, text) for name, text in cells if text]

    def feed_alarms(self, row: dict[str, Any]) -> list[str]:
        """Add the alarms of a row. Return a line for each that begins to fire."""
        new = key_of(row)
        if new.kind != "take":
            return []
        held = {name: at for name, at in self.alarms.items() if not supersedes(new, at)}
        self.alarms = {name: held.get(name, new) for name in firing(row)}
        return [
            f"step {new.step}  alarm {name} fires; remedies: docs/alarms.md"
            for name in self.alarms
            if name not in held
        ]

    def feed_failures(self, status: dict[str, Any], now: float) -> list[str]:
        """Add the failures of the buffer's STATUS. Return the lines to print for them.

        A new failure gets a line, a repeated one another line after each pause.
        """
        self.failures = failures_of(status)
        lines = []
        for failure in reversed(self.failures):
            source = (failure.kind, failure.name)
            count, due, pause_s = self._printed.get(source, (0, -math.inf, REPEAT_S))
            if failure.count > count and now >= due:
                later_s = min(2 * pause_s, REPEAT_LIMIT_S)
                self._printed[source] = (failure.count, now + pause_s, later_s)
                lines.append(str(failure))
        return lines

    def feed_alerts(self, rows: list[dict[str, Any]]) -> list[str]:
        """Add alerts. Return a line for each that nothing else shows."""
        lines = [f"{one['title']}: {one['text']}" for one in rows if one.get("console")]
        self.alerts = [*reversed(lines), *self.alerts][:SHOWN]
        return lines

    def panel(self) -> Panel:
        """Format the newest step, the evaluations and what is wrong as a panel."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        rows: list[tuple[str, str | Text]] = [*self.cells()] or [("waiting", "for the first step")]
        if self.evals:
            spark = "".join(BARS[round(v * (len(BARS) - 1))] for v in self.evals[-SPARKS:])
            _, newest = self.evaluations[-1]
            distinct = number(newest.get("eval/distinct"))
            text = f"{spark} {self.evals[-1]:.3f} ({distinct} distinct){self._exact_values(newest)}"
            rows.append(("eval success", text))
        rows += self.step_cells()
        if self.validated and not validation(self.row):
            rows.append(("validation", self.validated))
        rows += [(f"eval {name}", value) for name, (_, value) in self.eval_sets.items()]
        rows += self.time_cells()
        rows += [("W&B", self.url)] if self.url else []
        if self.silent_s is not None:
            text = Text(f"does not answer for {self.silent_s:.0f} s", "red")
            rows.append(("buffer", text))
        rows += [("stalled", self.stalled)] if self.stalled else []
        for name, at in self.alarms.items():
            rows.append(("alarm", Text(f"{name} fires since step {at.step}", "yellow")))
        rows += [("alert", Text(text, "red")) for text in self.alerts]
        for failure in self.failures[:SHOWN]:
            rows.append(("failures", Text(str(failure), "red")))
        rows += [("", text) for text in self.waiting[:SHOWN]]
        for name, text in rows:  # a text of its own, as brackets in a string would be markup
            grid.add_row(Text(name), text if isinstance(text, Text) else Text(text))
        return Panel(grid, title=Text(self.name), border_style="cyan", expand=False)

    def cells(self) -> list[tuple[str, str]]:
        """Format the newest step as names and texts, without the values that the row lacks."""
        if not self.row:
            return []
        total = f"/{self.steps}" if self.steps else ""
        stage = self.row.get("stage_kind", "")
        cells = [("step", f"{self.row['step']}{total} {stage}".strip())]
        for name, pattern in (
            ("success", "{train/success}"),
            ("reward", "{train/reward_mean} ± {train/reward_std}"),
            *(() if "train/success" in self.row else [("loss", "{loss/policy}")]),
            *(() if "train/success" in self.row else [("preferred", "{dpo/accuracy}")]),
            *([("validation", text)] if (text := validation(self.row)) else []),
            ("staleness", "{staleness/mean} (max {staleness/max})"),
            ("ess", "{offpolicy/ess}"),
            ("tokens/s", "{throughput/tokens_per_s}"),
            ("groups/s", "{throughput/groups_per_s}"),
            ("buffer", "{buffer/ready} ready, {buffer/open} open"),
        ):
            with contextlib.suppress(KeyError):
                cells.append((name, pattern.format_map(_Numbers(self.row))))
        cells += mechanisms(self.row)
        wait_s, train_s = self.row.get("time/wait_s"), self.row.get("time/train_s")
        if wait_s is not None and train_s:
            cells.append(("waiting", f"{wait_s / (wait_s + train_s):.0%}"))
        if self.stalls:
            longest_s = self.row["supervision/longest_s"]
            cells.append(("stalled", f"{self.stalls} (longest {longest_s:.0f} s)"))
        cells.append(("time", clock(self.row["time_s"])))
        eta_s = self._eta_s()
        if eta_s is not None:
            cells.append(("eta", clock(eta_s)))
        return cells

    def time_cells(self) -> list[tuple[str, str]]:
        """Format the time of the processes over the newest steps, and the advice."""
        budget = throughput.TimeBudget.of(self.recent)
        stage = throughput.newest_stage(self.recent)
        setup = self.setups[min(stage, len(self.setups) - 1)]  # a resume can have added stages
        cells = [
            ("actors' time", throughput.line(budget.actor)),
            ("learner's time", throughput.line(budget.learner)),
            ("advice", throughput.advice(budget, setup)),
        ]
        return [(name, text) for name, text in cells if text]

    def _eta_s(self) -> float | None:
        """Estimate the remaining seconds by the pace so far."""
        if self.first is None or not self.steps:
            return None
        steps, seconds = self.row["step"] - self.first[0], self.row["time_s"] - self.first[1]
        return (self.steps - self.row["step"]) * seconds / steps if steps > 0 else None

    def _exact_values(self, row: dict[str, Any]) -> str:
        """Format the values on the tasks of an evaluation; "" if they are not known."""
        values = self.exact.get((row.get("eval/stage"), row["eval/episodes"]))
        if values is None:
            return ""
        return " (random policy {random:.3f}, optimal {optimal:.3f})".format_map(values)


def _step(evaluation: tuple[RowKey, dict[str, Any]]) -> int:
    return evaluation[0].step


class _Numbers(dict[str, Any]):
    """Row whose values are formatted numbers."""

    def __getitem__(self, name: str) -> str:
        return number(super().__getitem__(name))
