"""Plots of a study, in `plots/`: curves, the final value by swept key, off-policy data by lag.

Curves and points are those of finished runs: means over seeds with 95 % intervals.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # draws files, needs no screen
from matplotlib import pyplot as plt

from evolver_async.study.directory import Study
from evolver_async.study.results import BUCKETS, BY_LAG, Point, RunResult
from evolver_async.study.statistics import Interval, interval, weighted_mean
from evolver_async.study.summary import CellSummary, cells_summary

SIZE = (7.0, 4.5)  # inches
DPI = 120
GRID_POINTS = 60  # of a curve by time
LEGEND_SIZE = 7
LABELS = {"ess": "effective sample size", "kl": "KL(behaviour ‖ policy)", "clip": "share clipped"}


def write(study: Study, results: Sequence[RunResult]) -> None:
    """Draw all plots for which there are finished runs."""
    cells = [one for one in cells_summary(study, results) if one.finished]
    if not cells:
        return
    folder = study.out / "plots"
    folder.mkdir(exist_ok=True)
    metric = study.definition.threshold.metric
    for name, label, x in (
        ("step", "learner step", lambda point: point.step),
        ("time", "seconds of training", lambda point: point.seconds),
        ("env_steps", "environment steps", lambda point: point.env_steps),
    ):
        with _figure(folder / f"curve_by_{name}.png", label, metric) as axes:
            for cell in cells:
                _curve(axes, cell, x, by_step=name == "step")
    for key in study.cells[0].swept:
        with _figure(folder / f"final_by_{_file_name(key)}.png", key, f"final {metric}") as axes:
            _finals(axes, cells, key)
    for measure in BY_LAG:
        path = folder / f"{measure}_by_lag.png"
        with _figure(path, "version lag", LABELS[measure]) as axes:
            for cell in cells:
                _by_lag(axes, cell, measure)


@contextmanager
def _figure(path: Path, x_label: str, y_label: str) -> Iterator[Any]:
    """Open the axes of a plot and write it; a plot without data is not written."""
    figure, axes = plt.subplots(figsize=SIZE)
    try:
        yield axes
        if axes.has_data():
            if y_label.endswith("success"):
                axes.set_ylim(-0.02, 1.02)  # intervals of few seeds are wider
            axes.set_xlabel(x_label)
            axes.set_ylabel(y_label)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=LEGEND_SIZE)
            part = path.with_name(f".{path.name}")
            figure.savefig(part, dpi=DPI, bbox_inches="tight", format="png")
            part.replace(path)
    finally:
        plt.close(figure)


def _file_name(key: str) -> str:
    return key.replace("/", "-")


def _curve(axes: Any, cell: CellSummary, x: Callable[[Point], float], by_step: bool) -> None:
    """Draw the mean curve of a cell: at common steps, or interpolated over the common range."""
    curves = [
        [(x(point), point.value) for point in one.points]
        for one in cell.results
        if one.state == "finished" and one.points
    ]
    if not curves:
        return
    if by_step:
        known = [dict(curve) for curve in curves]
        places = sorted(set.intersection(*(set(one) for one in known)))
        columns = [[one[place] for one in known] for place in places]
    else:
        low, high = max(one[0][0] for one in curves), min(one[-1][0] for one in curves)
        width = max(0.0, high - low)
        places = [low + width * index / (GRID_POINTS - 1) for index in range(GRID_POINTS)]
        columns = [[height(one, place) for one in curves] for place in places]
    _band(axes, places, [interval(column) for column in columns], cell.cell.name, marker="")


def height(curve: Sequence[tuple[float, float]], place: float) -> float:
    """Return the value of a curve at `place`, linear between its points, constant outside."""
    if place <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= place <= x1 and x1 > x0:
            return y0 + (y1 - y0) * (place - x0) / (x1 - x0)
    return curve[-1][1]


def _band(
    axes: Any, places: Sequence[Any], values: Sequence[Interval], label: str, marker: str
) -> None:
    """Draw means with their intervals, if there are any."""
    means = [one.mean for one in values]
    (line,) = axes.plot(places, means, marker=marker, label=label, linewidth=1.5)
    halves = [one.half or 0.0 for one in values]
    if any(halves):
        low = [mean - half for mean, half in zip(means, halves, strict=True)]
        high = [mean + half for mean, half in zip(means, halves, strict=True)]
        axes.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def _finals(axes: Any, cells: Sequence[CellSummary], key: str) -> None:
    """Draw the final value by a key: one line for each combination of the other keys."""
    order = list(dict.fromkeys(one.cell.swept[key] for one in cells))
    lines: dict[str, dict[str, Interval]] = {}
    for one in cells:
        others = [f"{axis}={value}" for axis, value in one.cell.swept.items() if axis != key]
        lines.setdefault(" ".join(others) or "all", {})[one.cell.swept[key]] = one.final
    for label, found in lines.items():
        values = [value for value in order if value in found and not math.isnan(found[value].mean)]
        means = [found[value].mean for value in values]
        halves = [found[value].half or 0.0 for value in values]
        places = [order.index(value) for value in values]
        axes.errorbar(places, means, yerr=halves, marker="o", capsize=3, label=label)
    axes.set_xticks(range(len(order)), order)


def _by_lag(axes: Any, cell: CellSummary, measure: str) -> None:
    """Draw a measure by bucket of version lag, over all seeds, weighted by tokens."""
    places, values = [], []
    for place, bucket in enumerate(BUCKETS):
        found = (one.by_lag.get((measure, bucket)) for one in cell.results)
        mean = weighted_mean([pair for pair in found if pair is not None])
        if mean is not None:
            places.append(place)
            values.append(mean)
    if places:
        axes.plot(places, values, marker="o", label=cell.cell.name, linewidth=1.2)
    axes.set_xticks(range(len(BUCKETS)), BUCKETS)
