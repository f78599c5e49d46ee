"""Tables of a study: `cells.csv`, one row a run, and `curves.csv`, one row a value."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from evolver_async.study.cells import short_names
from evolver_async.study.directory import Study
from evolver_async.study.run_results import (
    CURVES,
    MEANS,
    CurveReader,
    RunResult,
    begins_with_cold_start,
)

AMOUNTS = {"step": "steps", "env_steps": "env_steps", "seconds": "seconds"}

OF_CELLS = (  # columns behind those of the swept keys
    *("state", "error", *AMOUNTS.values(), "final", "best", "best_step", "area"),
    *(f"{name}_to_threshold" for name in AMOUNTS.values()),
    *(name.replace("offpolicy/", "").replace("/", "_") for name in MEANS),
)
OF_CURVES = (*AMOUNTS, "metric", "value")


def write(study: Study, results: Sequence[RunResult]) -> None:
    """Write both tables; each file is replaced at once."""
    axes = list(study.cells[0].swept)
    columns = list(short_names(axes, ("cell", "seed", *OF_CELLS, *OF_CURVES)).values())
    _write(study.out / "cells.csv", _cell_rows(study, results, axes, columns))
    _write(study.out / "curves.csv", _curve_rows(study, results, axes, columns))


def _cell_rows(
    study: Study, results: Sequence[RunResult], axes: Sequence[str], columns: Sequence[str]
) -> Iterable[Sequence[object]]:
    yield ["cell", "seed", *columns, *OF_CELLS]
    for result in results:
        run, last, best = result.run, result.last, result.best
        assert run.cell is not None
        to_threshold = result.to_threshold(study.definition.threshold.value)
        yield [
            *(run.cell.name, run.seed, *(run.cell.swept[axis] for axis in axes)),
            *(result.state, result.error),
            *(None if last is None else getattr(last, name) for name in AMOUNTS),
            *(result.final, best and best.value, best and best.step, result.area),
            *(to_threshold[name] for name in AMOUNTS),
            *(result.means[name] for name in MEANS),
        ]


def _curve_rows(
    study: Study, results: Sequence[RunResult], axes: Sequence[str], columns: Sequence[str]
) -> Iterable[Sequence[object]]:
    metrics = dict.fromkeys((study.definition.threshold.metric, *CURVES))
    from_cold = begins_with_cold_start(study)
    yield ["cell", "seed", *columns, *OF_CURVES]
    for result in results:
        run = result.run
        assert run.cell is not None
        curves = CurveReader(study, run, from_cold)
        own = [run.cell.name, run.seed, *(run.cell.swept[axis] for axis in axes)]
        for metric in metrics:
            for point in curves.points(metric):
                yield [*own, *point[:3], metric, point.value]


def _write(path: Path, rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    part = path.with_name(f".{path.name}")
    part.write_text(text.getvalue(), encoding="utf-8")
    part.replace(path)
