"""Progress of a run between two rows: texts of the present step, and lines for the console. Pure.

A line is for a state that lasts: it comes once, and again after growing pauses while it lasts.
"""

from typing import Any

from evolver_async.buffer.monitor.stalls import BusyProcess
from evolver_async.durations import clock
from evolver_async.runs.watch.status_text import stalls_of
from evolver_async.terminal import plain

FIRST_S = 30.0  # of a step, or of an evaluation, until its first line
PAUSE_S = 60.0  # between two reports of a state, doubled each time
PAUSE_LIMIT_S = 960.0
TOLD_SHARE = 0.25  # of the first data, from which on their pace tells the time of the run
BAR_CELLS = 16

Status = dict[str, Any]


def bar(share: float, cells: int = BAR_CELLS) -> str:
    """Return a bar of so many cells."""
    full = round(min(1.0, max(0.0, share)) * cells)
    return "█" * full + "░" * (cells - full)


def step_text(status: Status) -> str:
    """Describe the present step of a STATUS: phase, bar, time to go; "" if nothing is known."""
    progress = status["progress"]
    if progress is None or not progress["phase"]:
        return ""
    share, phase = progress["share"], plain(progress["phase"])
    if phase == "data":
        done, needed = progress["done"], progress["needed"]
        text = f"learner waits for data: {done} of {needed} members done"
        waits = [wait["sample"] for wait in status["waiting"].values() if "sample" in wait]
        if not done and waits:
            return f"{text} ({plain(waits[0]['reason'])})"
    elif phase == "evaluation":
        return f"evaluation: {plain('; '.join(status['evaluations'])) or 'its results are awaited'}"
    elif not progress["micro_batches"] or not progress["for_s"]:
        return phase
    else:
        text = f"{phase}, {progress['micro_batches']} micro-batches"
    eta_s = progress["eta_s"]
    return f"{text} {bar(share)} {share:.0%}{'' if eta_s is None else f', eta {clock(eta_s)}'}"


def first_eta(
    progress: dict[str, Any] | None, steps: int, *, apart: bool, estimate_s: float = 0.0
) -> str:
    """Estimate the run's time to go before two steps tell it; "" if nothing does.

    `apart`: data of a step come while another one is computed. While the first data come, nothing
    is known of the computations: `estimate_s`, seconds of a step that were estimated before the
    start, tells it, or the pace of the data alone if these are 0.
    """
    if not steps:
        return ""
    done = progress["step"] - 1 if progress is not None else 0
    computes = (
        progress is not None and progress["eta_s"] is not None and progress["phase"] != "data"
    )
    if estimate_s and not computes:
        return f"about {clock(max(0, steps - done) * estimate_s)} as estimated before the start"
    if progress is None or progress["eta_s"] is None:
        return ""
    own_s, later = progress["for_s"] + progress["eta_s"], max(0, steps - progress["step"])
    if progress["phase"] == "data":
        if progress["share"] < TOLD_SHARE:
            return ""
        return f"about {clock(progress['eta_s'] + later * own_s)} by the data alone"
    both = (own_s, progress["data_s"])
    return f"about {clock(progress['eta_s'] + later * (max(both) if apart else sum(both)))}"


class StateLines:
    """Lines for the console out of successive STATUS replies. `steps`: of the run, 0 if unknown."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        # of each state: time of its next report, the pause after that, and when it was seen last
        self._states: dict[str, tuple[float, float, float]] = {}
        self._stalled: dict[str, float] = {}  # seconds of those said to stand still
        self._busy: set[tuple[str, str]] = set()  # said to be so

    def feed(self, status: Status, eta: str, now: float) -> list[str]:
        """Return the lines that a STATUS of time `now` calls for. `eta`: of the run, or ""."""
        return [*self._of_stalls(status, now), *self._of_step(status, eta, now)]

    def _of_stalls(self, status: Status, now: float) -> list[str]:
        """The longest stall, its end, and processes that only compute."""
        lines, found = [], status["stalled"]
        texts = stalls_of(status)
        for stall, text in list(zip(found, texts, strict=True))[:1]:
            if self._due(f"stall {stall['who']}", now):
                more = len({one["who"] for one in found}) - 1
                lines.append(f"{text}{f'; and {more} more processes' if more else ''}")
                self._stalled[stall["who"]] = 0.0
        still = {stall["who"]: stall["for_s"] for stall in found}
        for who in list(self._stalled):
            if who in still:
                self._stalled[who] = still[who]
            else:
                lines.append(f"{plain(who)} goes on after {self._stalled.pop(who):.0f} s")
                self._states.pop(f"stall {who}", None)
        for one in status["busy"]:
            if (one["who"], one["phase"]) not in self._busy:
                self._busy.add((one["who"], one["phase"]))
                lines.append(plain(BusyProcess(**one).text))
        return lines

    def _of_step(self, status: Status, eta: str, now: float) -> list[str]:
        text, progress = step_text(status), status["progress"]
        if not text:
            return []
        evaluates = progress["phase"] == "evaluation"
        step = f"{progress['step']}{f'/{self._steps}' if self._steps else ''}"
        state = "evaluation" if evaluates else f"step {step}"
        self._states = {name: one for name, one in self._states.items() if name[:5] != "step "} | {
            state: self._states.get(state, (now + FIRST_S, FIRST_S, now))
        }
        if not self._due(state, now):
            return []
        end = f"; run eta {eta}" if eta and not evaluates else ""
        return [text if evaluates else f"{state}  {text}{end}"]

    def _due(self, state: str, now: float) -> bool:
        """Return True if a present state is to be reported; this begins its next pause."""
        due, pause_s, seen = self._states.get(state, (now, PAUSE_S / 2, now))
        if now - seen > max(PAUSE_S, pause_s):  # it had ended
            due, pause_s = now, PAUSE_S / 2
        if is_due := now >= due:
            pause_s = min(2 * pause_s, PAUSE_LIMIT_S)
            due = now + pause_s
        self._states[state] = due, pause_s, now
        return is_due
