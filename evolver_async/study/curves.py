"""Points that plots and reports of a study draw: means over the seeds of a cell with intervals."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from evolver_async.metrics.families import bounds_of
from evolver_async.study.run_results import BUCKETS, Point
from evolver_async.study.statistics import Interval, interval, weighted_mean
from evolver_async.study.summary import CellSummary

Axis = Literal["step", "env_steps", "seconds"]
AXES: dict[Axis, str] = {
    "step": "learner step",
    "env_steps": "environment steps",
    "seconds": "seconds of training",
}
GRID_POINTS = 60  # of a curve by another axis than the step


@dataclass(frozen=True)
class StudyCurve:
    """A line with an interval at each of its places; `label` names it."""

    label: str
    places: list[float]
    values: list[Interval]

    @property
    def low(self) -> list[float]:
        """The lower ends of the intervals; the mean where there is none."""
        return [one.mean if one.low is None else one.low for one in self.values]

    @property
    def high(self) -> list[float]:
        return [one.mean if one.high is None else one.high for one in self.values]


def mean_curve(cell: CellSummary, axis: Axis) -> StudyCurve | None:
    """Return the mean curve of a cell's finished runs, None without a range that all of them cover.

    None too if a run has a place that is not known. The curves are interpolated over that range: by
    step at the steps of any seed, by another axis at GRID_POINTS places.
    """
    curves = [
        [(_at(point, axis), point.value) for point in one.points]
        for one in cell.results
        if one.counts and one.points
    ]
    if not curves or any(math.isnan(place) for curve in curves for place, _ in curve):
        return None
    low, high = max(one[0][0] for one in curves), min(one[-1][0] for one in curves)
    if high < low:
        return None
    if axis == "step" or low == high:
        known = {place for curve in curves for place, _ in curve}
        places = sorted(place for place in known if low <= place <= high)
    else:
        step = (high - low) / (GRID_POINTS - 1)
        places = [low + step * index for index in range(GRID_POINTS)]
    columns = [[height(one, place) for one in curves] for place in places]
    bounds = bounds_of(cell.metric)
    values = [interval(column, bounds=bounds) for column in columns]
    return StudyCurve(cell.cell.name, places, values)


def _at(point: Point, axis: Axis) -> float:
    return {"step": point.step, "env_steps": point.env_steps, "seconds": point.seconds}[axis]


def height(curve: Sequence[tuple[float, float]], place: float) -> float:
    """Return the value of a curve at `place`, linear between its points, constant outside."""
    if place <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= place <= x1 and x1 > x0:
            return y0 + (y1 - y0) * (place - x0) / (x1 - x0)
    return curve[-1][1]


def reached(curve: StudyCurve, level: float) -> float | None:
    """Return the first place at which the means are at `level`, linear between places, or None."""
    before: tuple[float, float] | None = None
    for place, one in zip(curve.places, curve.values, strict=True):
        if one.mean >= level:
            if before is None:
                return place
            x, y = before
            return x + (place - x) * (level - y) / (one.mean - y)
        before = place, one.mean
    return None


def swept_values(cells: Sequence[CellSummary], key: str) -> list[str]:
    """Return the values of a swept key in the order of the grid."""
    return list(dict.fromkeys(one.cell.swept[key] for one in cells))


def finals(cells: Sequence[CellSummary], key: str) -> list[StudyCurve]:
    """Return the final values by a swept key, a line for each combination of the other keys.

    The places are those of `swept_values`.
    """
    order = swept_values(cells, key)
    lines: dict[str, dict[str, Interval]] = {}
    for one in cells:
        others = [f"{axis}={value}" for axis, value in one.cell.swept.items() if axis != key]
        lines.setdefault(" ".join(others) or "all", {})[one.cell.swept[key]] = one.final
    made = []
    for label, found in lines.items():
        values = [value for value in order if value in found and not math.isnan(found[value].mean)]
        places = [float(order.index(value)) for value in values]
        made.append(StudyCurve(label, places, [found[value] for value in values]))
    return made


def by_lag(cell: CellSummary, measure: str) -> StudyCurve:
    """Return a measure by bucket of version lag, over the finished seeds, weighted by tokens.

    The places are those of `BUCKETS`; the values have no interval.
    """
    counted = [one for one in cell.results if one.counts]
    places, values = [], []
    for place, bucket in enumerate(BUCKETS):
        found = (one.by_lag.get((measure, bucket)) for one in counted)
        mean = weighted_mean([pair for pair in found if pair is not None])
        if mean is not None:
            places.append(float(place))
            values.append(Interval(mean, None, 1))
    return StudyCurve(cell.cell.name, places, values)
