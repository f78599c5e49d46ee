"""Sections about the data of a run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reported_runs import SEGMENT_BYTES, MadeRun

from evolver_async.runs.chosen_curves import Curve
from evolver_async.runs.report.plots.curve_plots import POINTS, CurveBoard, Figure
from evolver_async.runs.report.sections import _data, sections
from evolver_async.runs.results.loaded_run import load_run
from evolver_async.runs.results.table import MetricTable
from evolver_async.wire.messages import Kept

LONG = 30_000  # trajectories of a long run


def title(figure: Figure) -> str:
    return figure.title.text  # pyright: ignore


def test_trained_and_evicted_rollouts_are_compared_over_the_same_time(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    run.step("left")
    run.close()
    one = replace(load_run(run.run_dir).trajectories[0], kind="rollout", fate="trained")
    trained = [replace(one, reward=float(number >= LONG / 2)) for number in range(LONG)]
    evicted = [replace(one, reward=float(late), fate="evicted") for late in (False, True)]
    board = CurveBoard(MetricTable([]), MetricTable([]), [])
    found = {title(one): one for one in _data(board, trained + evicted).figures}
    for bars in found["Reward of trained and evicted rollouts"].renderers:
        shares = bars.data_source.data["top"]  # pyright: ignore
        assert (shares[0], shares[-1]) == (0.5, 0.5)


@pytest.mark.parametrize("kept", [True, False])
def test_lags_come_from_the_metrics_where_the_journal_has_lost_trajectories(
    tmp_path: Path, kept: bool
) -> None:
    archive = "all" if kept else "none"
    run = MadeRun(tmp_path / "run", segment_bytes=SEGMENT_BYTES, archive=archive)
    for _ in range(12):
        run.step("left", "right", "up")
        run.world.ask("learner", Kept(take=run.takes))
    run.close()
    results = load_run(run.run_dir)
    assert bool(results.missing) != kept
    for row in results.rows:
        row |= {"lag_1/trajectories": 4.0, "lag_1/tokens": 40.0}
    found = [one for section in sections(results, results.trajectories) for one in section.figures]
    source = "journal" if kept else "metrics"
    wanted = f"Trained trajectories by version lag (from the {source})"
    (figure,) = [one for one in found if title(one) == wanted]
    counts = figure.renderers[0].data_source.data["value"]  # pyright: ignore
    assert np.sum(counts) == 12 * 4


def test_a_curve_of_a_long_run_has_the_few_values_between_the_steps_that_are_drawn() -> None:
    rows = [{"step": step, "loss/policy": 1.0} for step in range(1, 2 * POINTS + 1)]
    rows[1]["loss/kl"] = 0.5  # of the second step, and the first and the third one are drawn
    rows[5]["loss/entropy"] = 0.0
    board = CurveBoard(MetricTable(rows), MetricTable([]), [])
    assert board.every == 2
    sparse, dense = (board.draw(Curve(name, {name: name})) for name in ("loss/kl", "loss/policy"))
    assert board.draw(Curve("always 0", {"loss/entropy": ""})) is None
    assert sparse is not None and dense is not None
    drawn = sparse.renderers[0].data_source.data  # pyright: ignore
    assert (drawn["step"].tolist(), drawn["value"].tolist()) == ([2], [0.5])
    assert len(dense.renderers[0].data_source.data["step"]) == POINTS  # pyright: ignore
