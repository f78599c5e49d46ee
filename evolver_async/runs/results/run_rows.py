"""Rollouts of a run as rows that an rl stage of another run learns from."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from evolver_async.buffer.tasks.logged import row_of
from evolver_async.model.tokenizer import vocabulary_hash
from evolver_async.runs.results.loaded_run import load_run
from evolver_async.runs.results.trajectories import RecordedTrajectory, TrajectoryGone


def logged_by(run_dir: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the place of every rollout in a run's journal, and what loads its row.

    That raises ValueError for one that the run has not kept, or that a row does not hold.
    """
    run = load_run(run_dir)
    tokenizer = vocabulary_hash(run.config.policy.path or run.path / "policy")
    for one in run.trajectories:
        if one.kind == "rollout":
            yield f"{run_dir}, trajectory {one.id}", partial(_row, one, tokenizer)


def _row(one: RecordedTrajectory, tokenizer: str) -> dict[str, Any]:
    try:
        row = row_of(one.load())
    except TrajectoryGone:
        raise ValueError("its journal segment was removed (buffer.archive=all keeps it)") from None
    known = {"tokenizer": tokenizer, "task": one.task.task_id, "group": one.group}
    return row | known | {"weights": str(one.oldest)}
