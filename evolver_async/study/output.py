"""Writing of a study's tables, summary and plots from the metrics of its runs, at any time."""

from evolver_async.study import plots, summary, tables
from evolver_async.study.directory import Study
from evolver_async.study.run_results import results_of

SUMMARY = "summary.md"


def write(study: Study) -> None:
    """Write cells.csv, curves.csv, summary.md and plots/."""
    results = results_of(study)
    tables.write(study, results)
    part = study.out / f".{SUMMARY}"
    part.write_text(summary.text(study, results), encoding="utf-8")
    part.replace(study.out / SUMMARY)
    plots.write(study, results)
