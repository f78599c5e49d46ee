"""Measurements of the cells of the evidence study, over their finished runs."""

import statistics
from dataclasses import dataclass

import numpy as np

from evolver_async.study.curves import StudyCurve, mean_curve, reached
from evolver_async.study.run_results import RunResult, rows_of
from evolver_async.study.statistics import Interval, interval
from evolver_async.study.summary import CellSummary

NOTHING = "–"
SHARE = (0.0, 1.0)


@dataclass(frozen=True)
class Amount:
    """Environment or RL steps at which a mean curve reached a level, None if it never did.

    `end` is the last place that the curve has.
    """

    place: float | None
    end: float

    @property
    def text(self) -> str:
        """Return the steps in words."""
        return "not reached" if self.place is None else f"{self.place:,.0f}"

    def over(self, other: "Amount") -> str:
        """Return the ratio to another amount, a bound if only one of both was reached."""
        if self.place is None and other.place is None:
            return NOTHING
        above = self.end if self.place is None else self.place
        below = other.end if other.place is None else other.place
        if below == 0:
            return NOTHING
        sign = "> " if self.place is None else "< " if other.place is None else ""
        return f"{sign}{above / below:.2f}"


@dataclass(frozen=True)
class Evidence:
    """Measurements of a cell over its finished runs, of which there is at least one."""

    summary: CellSummary
    curve: StudyCurve  # by environment steps
    env_steps: Amount  # to the threshold of the study
    steps: Amount
    wasted_last: Interval
    wasted_mean: Interval
    freed: Interval

    @property
    def runs(self) -> list[RunResult]:
        """Return its finished runs."""
        return [one for one in self.summary.results if one.state == "finished"]

    @property
    def name(self) -> str:
        """Return the name of the cell."""
        return self.summary.cell.name


def evidence_of(cell: CellSummary, threshold: float) -> Evidence | None:
    """Return the measurements of a cell, None without a finished run."""
    by_env_steps, by_step = mean_curve(cell, "env_steps"), mean_curve(cell, "step")
    if by_env_steps is None or by_step is None:
        return None
    done = [one for one in cell.results if one.state == "finished"]
    wasted, freed = (
        [found for one in done if (found := values_of(one, metric))]
        for metric in ("guidance/wasted", "boost/freed_fraction")
    )
    return Evidence(
        summary=cell,
        curve=by_env_steps,
        env_steps=amount(by_env_steps, threshold),
        steps=amount(by_step, threshold),
        wasted_last=interval([found[-1] for found in wasted], bounds=SHARE),
        wasted_mean=interval([statistics.fmean(found) for found in wasted], bounds=SHARE),
        freed=interval([statistics.fmean(found) for found in freed], bounds=SHARE),
    )


def at_equal_steps(one: Evidence, first: Evidence) -> Interval:
    """Return the difference of a cell's success to the end of `first`, seed by seed, at the
    environment steps that `first` has taken then: linear between evaluations, at most the end."""
    ends = {run.run.seed: run.points[-1] for run in first.runs if run.points}
    differences = []
    for run in one.runs:
        end = ends.get(run.run.seed)
        if end is not None and run.points:
            places = [point.env_steps for point in run.points]
            values = [point.value for point in run.points]
            differences.append(float(np.interp(end.env_steps, places, values)) - end.value)
    return interval(differences, bounds=(-1.0, 1.0))


def values_of(result: RunResult, metric: str) -> list[float]:
    """Return a metric of the RL steps of a run, of those that have it."""
    rows = rows_of(result.run.directory)
    return [
        float(row[metric])
        for row in rows
        if row.get("stage_kind") == "rl" and row.get(metric) is not None
    ]


def amount(curve: StudyCurve, level: float) -> Amount:
    """Return the place at which a curve reaches a level."""
    return Amount(reached(curve, level), curve.places[-1] if curve.places else 0.0)
