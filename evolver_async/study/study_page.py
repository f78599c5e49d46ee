"""Page of a study, or of given runs: the tables of its summary, interactive curves, and every run.

Cells lead to their runs, and points of the curves by step to the trajectories that a run trained
there: to its own page, if it has one beside its files.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from evolver_async.runs.report.page import Frame, framed, write_page
from evolver_async.runs.report.page_tables import Link, Table
from evolver_async.runs.report.sections import PageSection
from evolver_async.runs.report.write import NAME
from evolver_async.study import curves, study_figures, summary
from evolver_async.study.directory import Study
from evolver_async.study.run_results import BUCKETS, BY_LAG, LABELS, RunResult, results_of
from evolver_async.study.summary import CellSummary

KEY = (
    "A click on a name in a legend hides its lines; the mouse shows values; a click on a curve by"
    " learner step leads to the trajectories of that step in the pages of its runs"
    " (<code>evolver-async report RUN_DIR</code> writes one)."
)
POINTS = '<p id="points" hidden></p>'  # where the script puts links


def write_study(study: Study, out: Path | None = None) -> Path:
    """Write the page of a study as one self-contained file; without `out` in its directory."""
    page, results = out or study.out / f"{NAME}.html", results_of(study)
    title = study.definition.recipe if study.given else study.out.resolve().name
    frame = Frame(
        kind="study",
        title=title,
        facts=_facts(study, results),
        key=KEY,
        script="study.js",
        data={"pages": json.dumps(_pages(results, page))},
        closing=POINTS,
    )
    write_page(page, framed(frame, study_sections(study, results, page)))
    return page


def study_sections(
    study: Study, results: Sequence[RunResult], page: Path | None = None
) -> list[PageSection]:
    """Return the sections: results, curves, final values, off-policy data, runs.

    `page`: from where links lead; without it there are none.
    """
    definition, cells = study.definition, summary.cells_summary(study, results)
    baseline = study.baseline
    done, metric = [one for one in cells if one.finished], definition.threshold.metric
    lines = {
        axis: [c for one in done if (c := curves.mean_curve(one, axis))] for axis in curves.AXES
    }
    return [
        PageSection(
            "Results",
            [
                "Intervals are 95 % (Student t) over the finished seeds. "
                + summary.compared_with(baseline).replace("`", ""),
                *summary.evaluated_on(results),
            ],
            tables=[
                _with_runs(
                    _table(metric, summary.value_rows(cells, baseline, definition)), cells, page
                ),
                *(
                    _table(f"Effect of {key}", rows)
                    for key, rows in summary.effect_tables(study, cells)
                ),
                _table(f"To {definition.threshold}", summary.threshold_rows(cells)),
            ],
        ),
        PageSection(
            "Curves",
            ["Bands are the intervals over the seeds."],
            [
                study_figures.bands(f"{metric} by {label}", label, lines[axis], name=f"by-{axis}")
                for axis, label in curves.AXES.items()
                if lines[axis]
            ],
        ),
        PageSection(
            "Final values", [], [_finals(done, key, metric) for key in _swept(study, done)]
        ),
        PageSection(
            "Off-policy data",
            ["Means over the rl steps; by version lag they are weighted by tokens."],
            [figure for measure in BY_LAG if (figure := _lags(done, measure)) is not None],
            [_table("Means over rl steps", summary.off_policy_rows(cells))],
        ),
        PageSection("Runs", [], tables=[_runs(study, results, page)]),
    ]


def _facts(study: Study, results: Sequence[RunResult]) -> list[tuple[str, str]]:
    states = [one.state for one in results]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    recipe = [] if study.given else [("recipe", study.definition.recipe)]
    return [
        *recipe,
        ("cells", str(len(study.cells))),
        ("seeds", ", ".join(map(str, study.definition.seeds))),
        ("runs", counted),
    ]


def _swept(study: Study, done: Sequence[CellSummary]) -> list[str]:
    return list(study.cells[0].swept) if done else []


def _finals(done: Sequence[CellSummary], key: str, metric: str) -> Any:
    values, title = curves.swept_values(done, key), f"Final {metric} by {key}"
    return study_figures.points(title, key, values, curves.finals(done, key))


def _lags(done: Sequence[CellSummary], measure: str) -> Any:
    """Return the figure of a measure by version lag, None if no cell has it."""
    found = [curve for one in done if (curve := curves.by_lag(one, measure)).places]
    if not found:
        return None
    return study_figures.points(LABELS[measure], "version lag", BUCKETS, found)


def _table(title: str, rows: Sequence[Sequence[str]]) -> Table:
    head, *body = [[cell.strip("`") for cell in row] for row in rows]
    return Table(title, head, body)


def _with_runs(table: Table, cells: Sequence[CellSummary], page: Path | None) -> Table:
    """Add a column with the seeds of each cell, which lead to its runs."""
    head = [*table.head, "seeds"]
    links = [[Link(str(one.run.seed), _href(one, page)) for one in cell.results] for cell in cells]
    rows = [[*row, seeds] for row, seeds in zip(table.rows, links, strict=True)]
    return Table(table.title, head, rows)


def _href(one: RunResult, page: Path | None) -> str:
    """Return the place of a run relative to the page: its own page, else its directory; "" if it
    has not begun."""
    directory = one.run.directory
    if page is None or not directory.is_dir():
        return ""
    own = _page_of(directory)
    return _relative(own, page) if own is not None else f"{_relative(directory, page)}/"


def _page_of(run_dir: Path) -> Path | None:
    pages = run_dir / f"{NAME}.html", run_dir / NAME / "index.html"
    return next((one for one in pages if one.is_file()), None)


def _relative(target: Path, page: Path) -> str:
    return quote(os.path.relpath(target.resolve(), page.resolve().parent))


def _pages(results: Sequence[RunResult], page: Path) -> dict[str, list[list[str]]]:
    """Return by cell the seed and the place of the page of each run that has one."""
    found: dict[str, list[list[str]]] = {}
    for one in results:
        own = _page_of(one.run.directory)
        if own is not None and one.run.cell is not None:
            entry = [str(one.run.seed), _relative(own, page)]
            found.setdefault(one.run.cell.name, []).append(entry)
    return found


def _runs(study: Study, results: Sequence[RunResult], page: Path | None) -> Table:
    metric = study.definition.threshold.metric
    head = ["run", "state", f"final {metric}", "best", "steps", "seconds", "error"]
    rows: list[list[Any]] = []
    for one in results:
        final, last = one.final, one.last
        rows.append(
            [
                [Link(one.run.name, _href(one, page))],
                one.state,
                "–" if final is None else round(final, 4),
                "–" if one.best is None else round(one.best.value, 4),
                "–" if last is None else int(last.step),
                "–" if last is None else round(last.seconds),
                " ".join(one.error.split()),
            ]
        )
    return Table("Every run, failed ones with their error", head, rows)
