"""The time of a run's processes on its page."""

import numpy as np
import pytest

from evolver_async.runs.report.plots.curve_plots import POINTS, CurveBoard, Figure
from evolver_async.runs.report.sections import _time
from evolver_async.runs.results.table import MetricTable
from evolver_async.runs.watch.throughput import TimeBudget


def time_of(rows: list[dict[str, float]]) -> tuple[CurveBoard, list[Figure]]:
    steps = [{"step": number, **row} for number, row in enumerate(rows, start=1)]
    board = CurveBoard(MetricTable(steps), MetricTable([]), [])
    return board, _time(board).figures


def shares_in(figure: Figure) -> dict[str, float]:
    (bars,) = figure.renderers
    columns = bars.data_source.data
    return dict(zip(columns["label"], columns["value"], strict=True))


def row(**learner: float) -> dict[str, float]:
    """A step of 10 s: activities of the learner, the rest `data`; phases that hold each other."""
    parts = {"data": 1 - sum(learner.values()), **learner}
    own = {f"throughput/learner/{name}": share for name, share in parts.items()}
    nested = {"time/train_s": 9.0, "time/optimizer_s": 6.0, "time/publish_s": 5.0}
    actor = {"throughput/actor/seconds": 20.0, "throughput/actor/engine": 1.0}
    return {"throughput/learner/seconds": 10.0, **own, **nested, **actor}


def test_a_second_is_of_one_activity_alone() -> None:
    """An update waits for the copy of a version within the optimizer's time."""
    board, (stacked, learner, actors) = time_of([row(publish=0.5, optimizer=0.1)] * 3)
    shares = shares_in(learner)
    assert shares == pytest.approx({"publish": 50.0, "optimizer": 10.0, "data": 40.0})
    expected = TimeBudget.of(board.all_steps).learner
    assert shares == pytest.approx({n: 100 * one for n, one in expected.items() if one})
    layers = stacked.renderers[0].data_source.data
    assert sum(layers[name][0] for name in layers if name != "step") == pytest.approx(10.0)
    assert shares_in(actors) == {"engine": 100.0}


def test_shares_are_over_all_steps_also_where_some_are_drawn() -> None:
    """Every second step is drawn, and just these come after a checkpoint."""
    rows = [row(checkpoint=0.5), row()] * POINTS
    board, (_, learner, _) = time_of(rows)
    assert board.every == 2 and np.allclose(board.steps["throughput/learner/checkpoint"], 0.5)
    assert shares_in(learner)["checkpoint"] == pytest.approx(25.0)
