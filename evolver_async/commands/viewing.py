"""`watch`, `status` and `runs`: the progress of runs."""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from evolver_async.commands.checked import run_directory
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.launch.run_directory import address_of
from evolver_async.process.addresses import keys_of
from evolver_async.transport.client import Rejected
from evolver_async.watch.live import watch
from evolver_async.watch.runs import listed
from evolver_async.watch.status import ask, status_lines


def watch_run(args: argparse.Namespace) -> int:
    """Show a run until interrupted: on the full screen of a terminal, else as text."""
    run_dir = run_directory(args.run_dir)
    config = load(run_dir / "config.yaml")
    if args.once or args.plain or not (sys.stdin.isatty() and sys.stdout.isatty()):
        watch(run_dir, config, follow=not args.once)
        return 0
    from evolver_async.dashboard.app import RunDashboard
    from evolver_async.dashboard.feed import RunFeed

    app = RunDashboard(RunFeed(run_dir, config))
    app.run()
    return app.return_code or 0


def status(args: argparse.Namespace) -> int:
    """Print the buffer's STATUS as a short text or as JSON."""
    address, keys = args.where, args.keys
    if "://" not in address:
        run_dir = run_directory(Path(address))
        address, keys = address_of(run_dir), keys or keys_of(load(run_dir / "config.yaml"))
    try:
        answer = asyncio.run(ask(address, keys))
    except (ValueError, Rejected) as error:
        raise ConfigError(str(error)) from None
    except TimeoutError:
        print(
            f"evolver-async: no buffer answers at {address}; see the run's logs/buffer.log",
            file=sys.stderr,
        )
        return 1
    print(json.dumps(answer, indent=2) if args.json else "\n".join(status_lines(answer)))
    return 0


def list_runs(args: argparse.Namespace) -> int:
    """Print one line per run of a directory, the newest last."""
    if not args.directory.is_dir():
        raise ConfigError(f"{args.directory}: is not a directory; name the one that holds the runs")
    runs = listed(args.directory)
    width = max((len(run["name"]) for run in runs), default=0)
    for run in runs:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["time"]))
        success = "–" if run["success"] is None else f"{run['success']:.3f}"
        distinct = "–" if run["distinct"] is None else f"{run['distinct']:.0f}"
        print(
            f"{run['name']:{width}}  {run['state']:10}  step {run['step']:6}"
            f"  {success:>5}  {distinct:>4} distinct  {when}"
        )
    if not runs:
        print(f"no runs in {args.directory}")
    return 0
