"""Plots of a study, in `plots/`: curves, the final value by swept key, off-policy data by lag.

Curves and points are those of finished runs: means over seeds with 95 % intervals.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # draws files, needs no screen
from matplotlib import pyplot as plt

from evolver_async.study.curves import (
    AXES,
    Axis,
    StudyCurve,
    by_lag,
    finals,
    mean_curve,
    swept_values,
)
from evolver_async.study.directory import Study
from evolver_async.study.run_results import BUCKETS, BY_LAG, LABELS, RunResult
from evolver_async.study.statistics import Interval
from evolver_async.study.summary import CellSummary, cells_summary

SIZE = (7.0, 4.5)  # inches
DPI = 120
LEGEND_SIZE = 7
FILES = {"step": "curve_by_step", "seconds": "curve_by_time", "env_steps": "curve_by_env_steps"}


def write(study: Study, results: Sequence[RunResult]) -> None:
    """Draw all plots for which there are finished runs."""
    cells = [one for one in cells_summary(study, results) if one.finished]
    if not cells:
        return
    folder = study.out / "plots"
    folder.mkdir(exist_ok=True)
    metric = study.definition.threshold.metric
    for axis in AXES:
        draw_curves(folder / f"{FILES[axis]}.png", cells, axis, metric)
    for key in study.cells[0].swept:
        with _figure(folder / f"final_by_{_file_name(key)}.png", key, f"final {metric}") as axes:
            for curve in finals(cells, key):
                axes.errorbar(
                    curve.places,
                    [one.mean for one in curve.values],
                    yerr=[*zip(*map(_arms, curve.values), strict=True)] or None,
                    marker="o",
                    capsize=3,
                    label=curve.label,
                )
            order = swept_values(cells, key)
            axes.set_xticks(range(len(order)), order)
    for measure in BY_LAG:
        with _figure(folder / f"{measure}_by_lag.png", "version lag", LABELS[measure]) as axes:
            for cell in cells:
                curve = by_lag(cell, measure)
                if curve.places:
                    means = [one.mean for one in curve.values]
                    axes.plot(curve.places, means, marker="o", label=curve.label, linewidth=1.2)
            axes.set_xticks(range(len(BUCKETS)), BUCKETS)


def draw_curves(path: Path, cells: Sequence[CellSummary], axis: Axis, metric: str) -> None:
    """Draw the mean curves of cells with their intervals into a PNG file."""
    with _figure(path, AXES[axis], metric) as axes:
        for cell in cells:
            if curve := mean_curve(cell, axis):
                _band(axes, curve)


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


def _band(axes: Any, curve: StudyCurve) -> None:
    """Draw means with their intervals, if there are any."""
    means = [one.mean for one in curve.values]
    mark = "o" if len(means) == 1 else ""  # a line of one point is invisible
    (line,) = axes.plot(curve.places, means, label=curve.label, linewidth=1.5, marker=mark)
    if any(one.half for one in curve.values):
        color = line.get_color()
        axes.fill_between(curve.places, curve.low, curve.high, color=color, alpha=0.15, linewidth=0)


def _arms(one: Interval) -> tuple[float, float]:
    """Return the parts of an interval below and above its mean; nan, which is not drawn, if there
    is none."""
    if one.low is None or one.high is None:
        return math.nan, math.nan
    return one.mean - one.low, one.high - one.mean
