"""`watch`, `status` and `runs`: the progress of runs."""

import argparse
import asyncio
import json
import shlex
import sys
import time
from pathlib import Path

from evolver_async.commands.checked import directory_of_runs, run_directory
from evolver_async.config import ConfigError
from evolver_async.config.load import load_written
from evolver_async.file_formats import RUN
from evolver_async.launch.run_directory import address_of, facts_of, origin_of
from evolver_async.metrics.launches import launches
from evolver_async.process.rendezvous import keys_of
from evolver_async.runs.watch import runs
from evolver_async.runs.watch.live import watch
from evolver_async.runs.watch.status_text import ask, status_lines
from evolver_async.terminal import say
from evolver_async.wire.client import Rejected
from evolver_async.wire.names import unresolved


def watch_run(args: argparse.Namespace) -> int:
    """Show a run: on the full screen of a terminal, else as text until it ends, and how it did."""
    run_dir = run_directory(args.run_dir)
    config = load_written(run_dir)
    if args.once or args.plain or not (sys.stdin.isatty() and sys.stdout.isatty()):
        watch(run_dir, config, follow=not args.once)
        running = runs.is_running(run_dir)
        say(f"{run_dir.name}: {'running' if running else runs.ending_of(run_dir).text}")
        return 0
    from evolver_async.runs.dashboard.app import RunDashboard
    from evolver_async.runs.dashboard.feed import RunFeed

    app = RunDashboard(RunFeed(run_dir, config))
    app.run()
    return app.return_code or 0


def status(args: argparse.Namespace) -> int:
    """Print the buffer's STATUS as a short text or as JSON."""
    address, keys, run_dir = args.where, args.keys, None
    if "://" not in address:
        run_dir = run_directory(Path(address))
        config = load_written(run_dir)
        if reason := _no_buffer(run_dir, config.launch.kind):
            say(f"evolver-async: {reason}", file=sys.stderr)
            return 1
        address, keys = address_of(run_dir), keys or keys_of(config)
    try:
        answer = asyncio.run(ask(address, keys))
    except (ValueError, Rejected) as error:
        raise ConfigError(str(error)) from None
    except TimeoutError:
        if problem := unresolved(address):
            raise ConfigError(f"{address}: {problem}") from None
        advice = "see the run's logs/buffer.log"
        if run_dir is not None and not runs.is_running(run_dir):
            advice = _ended(run_dir)
        say(f"evolver-async: no buffer answers at {address}; {advice}", file=sys.stderr)
        return 1
    say(json.dumps(answer, indent=2) if args.json else "\n".join(status_lines(answer)))
    return 0


def _no_buffer(run_dir: Path, kind: str) -> str:
    """Return the reason why no buffer of a launched run can answer; "" if one can.

    `kind` is that of its launcher. A run of rerun, and one that was never launched,
    have no reason: `address_of` refuses them.
    """
    recorded, origin = "address" in (facts_of(run_dir / RUN) or {}), origin_of(run_dir)
    if not recorded and origin is not None and origin.kind == "rerun":
        return ""
    if runs.is_running(run_dir):
        if kind == "serial":
            return f"{run_dir}: has no buffer to ask, as launch.kind=serial; {_steps(run_dir)}"
        starting = f"{run_dir}: is starting and has no buffer yet; ask again in a few seconds"
        return "" if recorded else starting
    # a recorded address without a recorded end: the lock may not reach this host, so ask
    over = (run_dir / runs.END).exists() if recorded else launches(run_dir)
    return f"{run_dir}: {_ended(run_dir)}" if over else ""


def _ended(run_dir: Path) -> str:
    """Describe the end of a run and the way to its steps."""
    return f"the run has ended: {runs.ending_of(run_dir).text}; {_steps(run_dir)}"


def _steps(run_dir: Path) -> str:
    return f"its steps: evolver-async watch --once {shlex.quote(str(run_dir))}"


def list_runs(args: argparse.Namespace) -> int:
    """Print one line per run of a directory, the newest last."""
    found = runs.listed(directory_of_runs(args.directory))
    if not found:
        say(f"no runs in {args.directory}")
        return 0
    width = max(len(run["name"]) for run in found)
    say(f"{'name':{width}}  {'state':10}  {'step':>6}  success  distinct  changed")
    for run in found:
        success = "–" if run["success"] is None else f"{run['success']:.3f}"
        distinct = "–" if run["distinct"] is None else f"{run['distinct']:.0f}"
        say(
            f"{run['name']:{width}}  {run['state']:10}  {run['step']:6}"
            f"  {success:>7}  {distinct:>8}  {_when(run['time'])}"
        )
    return 0


def _when(moment: float) -> str:
    """Return the local time of a moment of this year, the date of an earlier one."""
    at = time.localtime(moment)
    this_year = at.tm_year == time.localtime().tm_year
    return time.strftime("%m-%d %H:%M" if this_year else "%Y-%m-%d", at)
