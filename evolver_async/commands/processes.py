"""`actor`, `ranks`, and the processes that the launcher starts by the same command line."""

import argparse
import os
import socket
from functools import partial
from pathlib import Path

from evolver_async.launch.rank_host import RankHost
from evolver_async.launch.registry import resolve
from evolver_async.metrics.gauges import GaugeThread
from evolver_async.process.setup import Main, RoleArgs, run_process
from evolver_async.wire.heartbeat import Heartbeat
from evolver_async.wire.messages import Beat


def role(args: argparse.Namespace) -> int:
    """Be one process of a run."""
    name = args.name or f"{args.command}-{socket.gethostname()}-{os.getpid()}"
    role_args = RoleArgs(
        address=args.connect,
        name=name,
        incarnation=args.incarnation,
        run_dir=(args.run or Path()).resolve(),
        parent_pid=args.parent,
        keys=args.keys and args.keys.resolve(),
        rank=args.rank,
        meeting=args.meeting,
    )
    if args.run is not None and args.command in ("buffer", "experience", "learner"):
        GaugeThread(args.run.resolve(), name).start()
    log_file = args.run / "logs" / f"{name}.log" if args.run else None
    return run_process(args.command, partial(_load, args.command, role_args), role_args, log_file)


def ranks(args: argparse.Namespace) -> int:
    """Run the ranks of a learner on this host until the run ends them."""
    return RankHost(args.run_dir.resolve(), args.host).run()


def _load(command: str, args: RoleArgs) -> Main:
    """Import the main function of a role. For a learner that takes long, and the buffer is told."""
    if command != "learner" or args.rank > 0:
        return resolve(command)
    identity = args.address, args.run_dir.name, args.name, args.incarnation, args.keys
    heartbeat = Heartbeat(*identity, read=lambda: Beat(role="learner", phase="start"))
    heartbeat.start()
    try:
        return resolve(command)
    finally:
        heartbeat.stop()
