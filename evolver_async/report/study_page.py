"""Page of a study: the tables of its summary, interactive curves, and every run with its state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evolver_async.report.page import Frame, framed, write_page
from evolver_async.report.plots import study_figures
from evolver_async.report.sections import PageSection
from evolver_async.report.tables import Table
from evolver_async.study import curves, summary
from evolver_async.study.directory import Study
from evolver_async.study.results import BUCKETS, BY_LAG, LABELS, RunResult, results_of
from evolver_async.study.summary import CellSummary

KEY = "A click on a name in a legend hides its lines; the mouse shows values."


def write_study(study: Study, out: Path | None = None) -> Path:
    """Write the page of a study as one self-contained file; without `out` in its directory."""
    page, results = out or study.out / "report.html", results_of(study)
    title, facts = study.out.resolve().name, _facts(study, results)
    frame = Frame(kind="study", title=title, facts=facts, key=KEY, script="study.js")
    write_page(page, framed(frame, study_sections(study, results)))
    return page


def study_sections(study: Study, results: Sequence[RunResult]) -> list[PageSection]:
    """Return the sections: results, curves, final values, off-policy data, runs."""
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
                _table(metric, summary.value_rows(cells, baseline, definition)),
                *(
                    _table(f"Effect of {key}", summary.effect_rows(cells, baseline, key))
                    for key in summary.crossed(study)
                ),
                _table(f"To {definition.threshold}", summary.threshold_rows(cells)),
            ],
        ),
        PageSection(
            "Curves",
            ["Bands are the intervals over the seeds."],
            [
                study_figures.bands(f"{metric} by {label}", label, lines[axis])
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
        PageSection("Runs", [], tables=[_runs(study, results)]),
    ]


def _facts(study: Study, results: Sequence[RunResult]) -> list[tuple[str, str]]:
    states = [one.state for one in results]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return [
        ("recipe", study.definition.recipe),
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


def _runs(study: Study, results: Sequence[RunResult]) -> Table:
    metric = study.definition.threshold.metric
    head = ["run", "state", f"final {metric}", "best", "steps", "seconds", "error"]
    rows: list[list[Any]] = []
    for one in results:
        final, last = one.final, one.last
        rows.append(
            [
                one.run.name,
                one.state,
                "–" if final is None else round(final, 4),
                "–" if one.best is None else round(one.best.value, 4),
                "–" if last is None else int(last.step),
                "–" if last is None else round(last.seconds),
                " ".join(one.error.split()),
            ]
        )
    return Table("Every run, failed ones with their error", head, rows)
