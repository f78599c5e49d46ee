"""`actor`, and the processes that the launcher starts by the same command line."""

import argparse
import os
import socket
from pathlib import Path

from evolver_async.launch.roles import RoleArgs, run_process


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
    return run_process(
        args.command, role_args, args.run / "logs" / f"{name}.log" if args.run else None
    )
