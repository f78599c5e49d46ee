"""`ingest`: rows to learn from, made of logs."""

import argparse

from evolver_async.buffer.tasks.ingestion import FILES, ingest
from evolver_async.config import ConfigError
from evolver_async.terminal import say


def ingest_logs(args: argparse.Namespace) -> int:
    """Write demonstrations, labels, preferences and tasks; say what was left out, and why."""
    columns = dict(entry.partition("=")[::2] for entry in args.columns)
    if wrong := [name for name, column in columns.items() if not column]:
        raise ConfigError(f"--columns: {wrong[0]}: is written messages=COLUMN")
    found = ingest(
        args.files,
        args.out,
        outcome=args.outcome,
        threshold=args.threshold,
        by=args.by,
        columns=columns,
    )
    say(f"read: {found.read:,} conversations")
    for name in FILES:
        say(f"{args.out / name}.jsonl: {found.written[name]:,} rows")
    for reason, count in found.left_out.most_common():
        say(f"left out: {count:,}: {reason}, last {found.last[reason]}")
    return 0
