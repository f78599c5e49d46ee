"""Live display of a run: it follows metrics.jsonl and asks the buffer for its STATUS.

It reads the file, so it works alike inside the launcher and attached to a running job. STATUS gives
the failures, the stalls and the progress of a step, and while no new step comes also the waiting
processes.
"""

import asyncio
import contextlib
import itertools
import logging
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rich.live import Live

from evolver_async.config import Config
from evolver_async.launch.pace import Pace, step_estimate
from evolver_async.launch.run_directory import EXACT, address_of, facts_of, origin_of
from evolver_async.metrics import first_reply
from evolver_async.metrics.alerts import ALERTS
from evolver_async.metrics.newest_lineage import current_rows
from evolver_async.metrics.tail import Tail
from evolver_async.metrics.wandb_process import url_of
from evolver_async.process.rendezvous import keys_of
from evolver_async.runs.watch.runs import END, is_running
from evolver_async.runs.watch.status_text import ask
from evolver_async.runs.watch.throughput import Setup
from evolver_async.runs.watch.view import SHOWN, ExactValues, View
from evolver_async.terminal import say
from evolver_async.terminal.console import SafeConsole
from evolver_async.wire.client import Rejected

POLL_S = 0.5
ASK_S = 2.0  # between two requests for STATUS
QUIET_S = 5.0  # without a new row, until stalls and waiting processes are shown

log = logging.getLogger(__name__)


@contextlib.contextmanager
def shown(run_dir: Path, config: Config, mode: str) -> Iterator[None]:
    """Show the run while the block runs. `mode` is auto, panel, lines or none."""
    if mode == "none":
        yield
        return
    stop = threading.Event()
    console = SafeConsole()
    live = None
    if mode == "panel" or (mode == "auto" and console.is_terminal):
        live = Live(console=console, refresh_per_second=4, transient=False)
        live.start()
    thread = threading.Thread(
        target=_show_embedded, args=(run_dir, config, live, stop), name="watch", daemon=True
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
    """Show a run from its first row on; with `follow` until it ends or sends nothing any more."""
    stop = threading.Event()
    if not follow:
        stop.set()
    console = SafeConsole()
    live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
    with live or contextlib.nullcontext():
        _show(run_dir, config, live, stop, False)


def _show_embedded(run_dir: Path, config: Config, live: Live | None, stop: threading.Event) -> None:
    """Show the run of this launch. A failure ends the display, says so, and never ends the run."""
    try:
        _show(run_dir, config, live, stop, True)
    except Exception:  # whatever a row or the terminal brings
        if live is not None:
            live.stop()  # else the panel covers what the console shows
        again = f"evolver-async watch {shlex.quote(str(run_dir))}"
        log.exception("the display failed; the run goes on. See it with: %s", again)


def _show(
    run_dir: Path, config: Config, live: Live | None, stop: threading.Event, embedded: bool
) -> None:
    """Show the run until `stop` is set, and its last rows after that.

    `embedded`: the display is part of a launch and prints no rows of earlier ones.
    """
    tail = Tail(run_dir / "metrics.jsonl")
    exact = exact_values(run_dir)
    pace = Pace.read(run_dir)
    estimate = pace and step_estimate(config, pace)
    view = View(
        *(run_dir.name, steps_of(config, run_dir), exact, Setup.by_stage(config)),
        estimate_s=estimate.step_s if estimate else 0.0,
    )
    alerts = Tail(run_dir / ALERTS)
    told = embedded and config.launch.kind == "serial"  # by the learner's log, in this process
    earlier = alerts.rows()
    reply_due = embedded and not first_reply.read(run_dir)
    if embedded:
        for row in itertools.chain.from_iterable(tail.pieces()):
            view.feed(row)
            view.feed_alarms(row)
    else:
        _print(view.feed_alerts(earlier[-SHOWN:]), live, sys.stderr)
    quiet_since = asked = time.monotonic()
    last, silent, answered = False, False, time.monotonic()
    while not last:
        last = stop.wait(POLL_S)
        if not embedded and ((run_dir / END).exists() or silent):
            last = last or not is_running(run_dir)  # a resumed run has the end of another launch
        if view.url is None and (url := url_of(run_dir)) is not None:
            view.url = url
            _print([f"W&B: {url}"], live)
        for row in current_rows(tail.rows()):
            line = view.feed(row)
            if not view.stalls:  # during a stall the buffer is asked about it
                quiet_since = time.monotonic()
            if line:
                _print([line], live)
            _print(view.feed_alarms(row), live, sys.stderr)
        if reply_due and (reply := first_reply.read(run_dir)):
            reply_due = False
            (live.console if live is not None else SafeConsole(soft_wrap=True)).print(
                reply, markup=False, highlight=False
            )
        lines = view.feed_alerts(alerts.rows())
        _print([] if told else lines, live, sys.stderr)
        quiet = time.monotonic() - quiet_since > QUIET_S
        if config.launch.kind == "serial":  # there is no buffer to ask
            silent = quiet
        elif not last and time.monotonic() - asked > ASK_S:
            lines = _feed_status(view, run_dir, config, quiet)
            answered = time.monotonic() if lines is not None else answered
            late_s = time.monotonic() - answered
            view.silent_s = late_s if late_s > config.buffer.warn_s else None
            silent = quiet and lines is None
            if quiet and lines is not None:
                quiet_since = time.monotonic()
            asked = time.monotonic()
            _print(lines or [], live, sys.stderr)
        if live is not None:
            live.update(view.panel())
        elif last and view.row:
            times = [] if embedded else [f"{name}: {text}" for name, text in view.time_cells()]
            _print([view.line(), *times], live)


def _feed_status(view: View, run_dir: Path, config: Config, quiet: bool) -> list[str] | None:
    """Add the buffer's STATUS to the view; return the lines to print, None without an answer."""
    try:
        status = asyncio.run(ask(address_of(run_dir), keys_of(config)))
    except (OSError, TimeoutError, ValueError, Rejected):
        return None
    now = time.monotonic()
    return view.feed_failures(status, now) + view.feed_status(status, now, quiet=quiet)


def _print(lines: list[str], live: Live | None, stream: TextIO | None = None) -> None:
    """Print lines, unless a panel shows them."""
    if live is None:
        for line in lines:
            say(line, stream, flush=True)


def exact_values(run_dir: Path) -> ExactValues:
    """Read the success of the random and of the optimal policy; {} if it is unknown."""
    facts = facts_of(run_dir / EXACT) or {}
    return {(one["stage"], one["episodes"]): one for one in facts.get("values", ())}


def steps_of(config: Config, run_dir: Path) -> int:
    """Sum the steps of all stages, less those before a fork; 0 if a stage has no such limit."""
    steps = [stage.steps for stage in config.stages]
    return max(0, sum(steps) - _steps_before(run_dir)) if all(steps) else 0


def _steps_before(run_dir: Path) -> int:
    """Return the steps before the fork in which a run began; 0 if it began by itself."""
    steps, seen = 0, {run_dir}
    while (origin := origin_of(run_dir)) is not None and origin.kind == "fork":
        steps, run_dir = steps + origin.step, Path(origin.run)
        if run_dir in seen:  # a record that leads back to itself
            break
        seen.add(run_dir)
    return steps
