"""`ingest`: rows to learn from, made of logs."""

import argparse
from itertools import chain

from evolver_async.buffer.tasks.ingestion import FILES, ingest
from evolver_async.config import ConfigError
from evolver_async.runs.results.run_rows import logged_by
from evolver_async.terminal import say


def ingest_logs(args: argparse.Namespace) -> int:
    """Write demonstrations, labels, preferences, tasks and trajectories, of files and of runs; say
    what was left out, and why."""
    columns = dict(entry.partition("=")[::2] for entry in args.columns)
    if wrong := [name for name, column in columns.items() if not column]:
        raise ConfigError(f"--columns: {wrong[0]}: is written messages=COLUMN")
    runs = [path for path in args.files if (path / "config.yaml").is_file()]
    found = ingest(
        [path for path in args.files if path not in runs],
        args.out,
        outcome=args.outcome,
        threshold=args.threshold,
        by=args.by,
        columns=columns,
        runs=chain.from_iterable(map(logged_by, runs)),
    )
    say(f"read: {found.read:,} conversations{' and trajectories' if runs else ''}")
    for name in FILES:
        say(f"{args.out / name}.jsonl: {found.written[name]:,} rows")
    for reason, count in found.left_out.most_common():
        say(f"left out: {count:,}: {reason}, last {found.last[reason]}")
    return 0
