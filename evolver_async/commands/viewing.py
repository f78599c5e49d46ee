"""`watch` and `status`: what a run is doing."""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from evolver_async.commands.checked import run_directory
from evolver_async.config.check import ConfigError
from evolver_async.config.load import load
from evolver_async.launch.directory import address_of
from evolver_async.launch.roles import keys_of
from evolver_async.study.watch import ask, longest_stall, watch
from evolver_async.transport import Rejected


def watch_run(args: argparse.Namespace) -> int:
    """Show a run until interrupted."""
    run_dir = run_directory(args.run_dir)
    watch(run_dir, load(run_dir / "config.yaml"), follow=not args.once)
    return 0


def status(args: argparse.Namespace) -> int:
    """Print the buffer's STATUS as JSON."""
    address, keys = args.where, args.keys
    if "://" not in address:
        run_dir = run_directory(Path(address))
        address, keys = address_of(run_dir), keys or keys_of(load(run_dir / "config.yaml"))
    try:
        said = asyncio.run(ask(address, keys))
    except (ValueError, Rejected) as error:
        raise ConfigError(str(error)) from None
    except TimeoutError:
        print(f"evolver-async: nobody answers at {address}", file=sys.stderr)
        return 1
    print(json.dumps(said, indent=2))
    if said["stalled"]:
        print(longest_stall(said), file=sys.stderr)
    return 0
