"""Tables of a live run grow with its file, and begin anew where the run goes back."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evolver_async.config import Config, StageConfig
from evolver_async.config.load import dump
from evolver_async.runs.dashboard.feed import RunFeed
from evolver_async.runs.results import table
from evolver_async.runs.results.loaded_run import load_run


def take(lineage: int, step: int) -> dict[str, Any]:
    values = {"train/success": step / 8, "failures/agent": float(step)}
    return {"step": step, "lineage": lineage, "time_s": 1.0, "stage_kind": "rl", **values}


def evaluation(lineage: int, step: int) -> dict[str, Any]:
    played = {"eval/episodes": 8.0, "eval/distinct": 8.0, "eval/stage": 0.0, "time_s": 1.0}
    return {"step": step, "lineage": lineage, "eval/success": step / 8, **played}


@pytest.fixture
def feed(tmp_path: Path) -> RunFeed:
    config = Config(stages=[StageConfig(steps=9)])
    dump(config, tmp_path / "config.yaml")
    return RunFeed(tmp_path, config)


def grow(feed: RunFeed, *rows: dict[str, Any]) -> None:
    with open(feed.run_dir / "metrics.jsonl", "a") as file:
        file.write("".join(f"{json.dumps(row)}\n" for row in rows))
    asyncio.run(feed.read())


def test_a_view_has_the_rows_of_the_newest_lineage_however_they_come(feed: RunFeed) -> None:
    for rows in (
        [take(1, 1), take(1, 2)],
        [take(1, 3), evaluation(1, 2)],
        [evaluation(1, 3), evaluation(1, 1)],
        [take(1, 4)],
        [evaluation(2, 2)],  # asked for again by the resumed learner
        [take(2, 3), take(2, 4)],
        [take(2, 5), evaluation(2, 4), take(3, 5)],
        [take(3, 6)],
    ):
        grow(feed, *rows)
        whole, snapshot = load_run(feed.run_dir), feed.snapshot
        assert snapshot.steps.rows == whole.steps.rows
        assert snapshot.steps.names == whole.steps.names
        assert snapshot.evaluations.rows == whole.evaluations.rows
        assert snapshot.events == whole.events


def test_a_new_step_converts_no_earlier_one(feed: RunFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a week has 100,000 steps, and the views are drawn twice a second."""
    counts: list[int] = []
    whole = table._column

    def counted(rows: Sequence[dict[str, Any]], name: str) -> Any:
        counts.append(len(rows))
        return whole(rows, name)

    monkeypatch.setattr(table, "_column", counted)
    grow(feed, *(take(1, step) for step in range(1, 9)))
    for step in (9, 10):
        assert len(feed.snapshot.steps["train/success"]) == step - 1
        grow(feed, take(1, step))
    assert counts == [8, 1, 1]


def test_the_best_success_is_that_of_evaluations_like_the_last(tmp_path: Path) -> None:
    easier = {"env": {"params": {"size": 3}}}
    config = Config(stages=[StageConfig(steps=9, override=easier), StageConfig(steps=9)])
    dump(config, tmp_path / "config.yaml")
    feed = RunFeed(tmp_path, config)
    grow(feed, take(1, 1), evaluation(1, 8))
    assert feed.snapshot.best == 1.0
    for stage in (1.0, 2.0):  # the last one was added by a resume, after the configuration was read
        grow(feed, evaluation(1, 10 + int(stage)) | {"eval/stage": stage, "eval/success": 0.5})
        assert feed.snapshot.best == 0.5
