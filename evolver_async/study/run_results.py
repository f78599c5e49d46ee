"""Results of a study's runs, read from their metrics.

Environment steps are the turns of all episodes that the buffer received, those of explorations
included and those of evaluations not (`RECEIVED_TURNS`). Seconds and environment steps of a run
that continues a cold start begin at the fork.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from evolver_async.buffer.stages import evaluation_digest
from evolver_async.config import ConfigError
from evolver_async.config.load import stage_config
from evolver_async.config.sections.run import FINAL_SET
from evolver_async.launch.run_directory import config_of
from evolver_async.metrics.newest_lineage import current_rows
from evolver_async.metrics.tail import Tail
from evolver_async.study.directory import CellRun, RunState, Study, cold_run, runs_of, state_of
from evolver_async.study.statistics import area, first_reach, weighted_mean

RECEIVED_TURNS = "ledger/received_turns"
METRICS = "metrics.jsonl"
BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")  # of version lag, in the order of an axis
BY_LAG = ("ess", "kl", "clip")
LABELS = {"ess": "effective sample size", "kl": "KL(behaviour ‖ policy)", "clip": "share clipped"}
OFFPOLICY = ("offpolicy/ess", "offpolicy/kl", "offpolicy/clip_low", "offpolicy/clip_high")
MEANS = (*OFFPOLICY, "staleness/mean")  # over the rl steps of a run
CURVES = (  # metrics of curves.csv beside that of the threshold
    *("eval/success", "eval/reward_mean", "train/success", "train/reward_mean", "loss/entropy"),
    *(*MEANS, "offpolicy/masked"),
)


TESTED = {  # metrics of the split test, measured at a run's end, by those of the curves
    "eval/success": f"eval/{FINAL_SET}/avg@1",
    "eval/reward_mean": f"eval/{FINAL_SET}/reward_mean",
}


class Point(NamedTuple):
    """Value of a metric, and how far the run was: steps, environment steps, seconds."""

    step: float
    env_steps: float
    seconds: float
    value: float


@dataclass(frozen=True)
class RunResult:
    """Results of one run so far; `points` are those of the threshold's metric.

    `tested`: the metric over the split test at the end of the run, None before it or without one.
    `counts`: it is in the means: it is finished, or was given as it is and has not failed.
    `distinct`: different tasks of its last evaluation, None if the metric is not of evaluations.
    """

    run: CellRun
    state: RunState
    error: str
    points: Sequence[Point]
    last: Point | None  # the newest step, whose value has no meaning
    means: dict[str, float | None]
    by_lag: dict[tuple[str, str], tuple[float, float]]  # (metric, bucket) to mean and tokens
    tested: float | None
    distinct: int | None
    counts: bool

    @property
    def final(self) -> float | None:
        """Value over the split test at the end; without one, that of the last evaluation."""
        if self.tested is not None:
            return self.tested
        return self.points[-1].value if self.points else None

    @property
    def best(self) -> Point | None:
        """The point with the largest value that is a number, the first of equal ones."""
        numbers = [point for point in self.points if not math.isnan(point.value)]
        return max(numbers, key=lambda point: point.value, default=None)

    @property
    def area(self) -> float | None:
        """Mean of the metric over the steps."""
        return area([(point.step, point.value) for point in self.points])

    def to_threshold(self, threshold: float) -> dict[str, float | None]:
        """Return the steps, environment steps and seconds at which the threshold was reached."""
        return {
            name: first_reach([(getattr(p, name), p.value) for p in self.points], threshold)
            for name in ("step", "env_steps", "seconds")
        }


def results_of(study: Study) -> list[RunResult]:
    """Read the results of all runs of a study, also of those that have not begun."""
    from_cold = begins_with_cold_start(study)
    return [_result(study, run, from_cold) for run in runs_of(study)]


def _result(study: Study, run: CellRun, from_cold: bool) -> RunResult:
    state, error = state_of(study, run)
    curves = CurveReader(study, run, from_cold)
    taken = [row for row in curves.rows if row.get("stage_kind") == "rl"]
    metric = study.definition.threshold.metric
    tested = curves.points(TESTED.get(metric, ""))
    of = TESTED[metric] if tested else metric
    distinct = curves.points(f"{of.rpartition('/')[0]}/distinct")
    return RunResult(
        run=run,
        state=state,
        error=error,
        points=curves.points(metric),
        last=next(reversed(curves.progress.values()), None),
        means={name: _mean(taken, name) for name in MEANS},
        by_lag=dict(_by_lag(taken)),
        tested=tested[-1].value if tested else None,
        distinct=int(distinct[-1].value) if distinct else None,
        counts=state == "finished" or (bool(study.given) and state == "unfinished"),
    )


@dataclass(frozen=True)
class ColdEnd:
    """End of a cold start: its seconds, and the last value of each metric of evaluations."""

    seconds: float
    evaluations: Mapping[str, float]


def cold_end(run_dir: Path) -> ColdEnd:
    """Return the end of a cold start; its metrics are read once, until they change."""
    try:
        state = (run_dir / METRICS).stat()
    except OSError:
        return ColdEnd(0.0, {})
    return _cold_end(run_dir, state.st_mtime_ns, state.st_size)


@lru_cache
def _cold_end(run_dir: Path, *_: int) -> ColdEnd:
    rows = rows_of(run_dir)
    evaluations: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: row["step"]):  # an earlier one can end later
        numbers = {name: row[name] for name in row if name.startswith("eval/")}
        evaluations |= {name: float(one) for name, one in numbers.items() if one is not None}
    return ColdEnd(_last_second(rows), evaluations)


@cache
def _evaluated_alike(cold_dir: Path, run_dir: Path) -> bool:
    """True if the last stage of a cold start and the first one after the fork evaluate alike.

    That is so if their tasks, the lengths of episodes and the temperature agree. Raises ConfigError
    without the files of one of them.
    """
    cold, own = (config_of(path) for path in (cold_dir, run_dir))
    count = len(cold.stages)
    last, first = stage_config(cold, count - 1), stage_config(own, count)
    return evaluation_digest(last) == evaluation_digest(first)


def begins_with_cold_start(study: Study) -> bool:
    """True if the curves of a study begin with its cold starts' ends: all runs evaluate alike.

    Curves of some runs alone would not compare with the others. False without the files of a cold
    start, which a study need not keep.
    """
    if not study.definition.cold_start:
        return False
    runs = [one for one in runs_of(study) if (one.directory / METRICS).exists()]
    try:
        return all(
            _evaluated_alike(cold_run(study, one.seed).directory, one.directory) for one in runs
        )
    except ConfigError:
        return False


class CurveReader:
    """Reader of the curves of one run.

    from_cold: the curves begin with the end of its cold start (`begins_with_cold_start`).
    """

    def __init__(self, study: Study, run: CellRun, from_cold: bool) -> None:
        self.rows = rows_of(run.directory)
        self.before = ColdEnd(0.0, {})
        if study.definition.cold_start and run.cell is not None:
            cold = cold_run(study, run.seed).directory
            self.before = cold_end(cold)
            if not from_cold:
                self.before = replace(self.before, evaluations={})
        self.progress = progress_of(self.rows, self.before.seconds)

    def points(self, metric: str) -> list[Point]:
        """Return the points of a metric by step; of several at one step the newest one counts.

        Evaluations begin at step 0 with the last one of the cold start if all runs of the study
        evaluate as their cold starts do. Otherwise a curve begins with the first evaluation of the
        run itself, after the fork: a run is not evaluated at its fork.
        """
        points: dict[float, Point] = {}
        if self.rows and metric in self.before.evaluations:
            points[0] = Point(0, 0.0, 0.0, self.before.evaluations[metric])
        for row in self.rows:
            if row.get(metric) is None:
                continue
            at = self.progress.get(row["step"])
            if at is None:  # an evaluation before the first step
                begin = self.before.seconds
                seconds = max(0.0, row.get("time_s", begin) - begin)
                at = Point(row["step"], 0.0, seconds, 0.0)
            points[row["step"]] = at._replace(value=float(row[metric]))
        return [points[step] for step in sorted(points)]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of the newest lineage; none if the run has no metrics."""
    return current_rows(Tail(run_dir / METRICS).rows())


def progress_of(rows: Sequence[dict[str, Any]], before_s: float = 0.0) -> dict[float, Point]:
    """Return environment steps and seconds by learner step; nan where a row lacks the former."""
    return {
        row["step"]: Point(
            row["step"],
            row.get(RECEIVED_TURNS, math.nan),
            max(0.0, row["time_s"] - before_s),
            0.0,
        )
        for row in rows
        if "stage_kind" in row
    }


def _last_second(rows: Sequence[dict[str, Any]]) -> float:
    """Return the seconds of training at the last step; 0 without steps."""
    return max((row["time_s"] for row in rows if "stage_kind" in row), default=0.0)


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    return weighted_mean([(row[name], 1.0) for row in rows if row.get(name) is not None])


def _by_lag(
    rows: Sequence[dict[str, Any]],
) -> Iterator[tuple[tuple[str, str], tuple[float, float]]]:
    """Yield means over the steps by version lag, weighted by tokens; clip counts both bounds."""
    for bucket in BUCKETS:
        for metric in BY_LAG:
            pairs = [*filter(None, map(partial(_lag_pair, bucket, metric), rows))]
            mean = weighted_mean(pairs)
            if mean is not None:
                yield (metric, bucket), (mean, sum(weight for _, weight in pairs))


def _lag_pair(bucket: str, metric: str, row: dict[str, Any]) -> tuple[float, float] | None:
    names = ("clip_low", "clip_high") if metric == "clip" else (metric,)
    found = [row.get(f"lag_{bucket}/{name}") for name in (*names, "tokens")]
    numbers = [number for number in found if number is not None]
    if len(numbers) < len(found):
        return None
    *values, tokens = numbers
    return sum(values), tokens
