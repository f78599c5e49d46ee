"""Writing of a study's tables, summary and plots from the metrics of its runs, at any time."""

from evolver_async.study import estimate, plots, summary, tables
from evolver_async.study.directory import Study
from evolver_async.study.estimate import START_S, RunEstimate
from evolver_async.study.results import results_of

SUMMARY = "summary.md"


def write(study: Study) -> None:
    """Write cells.csv, curves.csv, summary.md and plots/."""
    results = results_of(study)
    tables.write(study, results)
    part = study.out / f".{SUMMARY}"
    part.write_text(summary.text(study, results), encoding="utf-8")
    part.replace(study.out / SUMMARY)
    plots.write(study, results)


def measured(study: Study) -> RunEstimate | None:
    """Return the time and disk of a run by those that are finished, None if there are none."""
    done = [one for one in results_of(study) if one.state == "finished" and one.last is not None]
    durations = [one.last.seconds + START_S for one in done if one.last is not None]
    return estimate.measured(durations, [one.run.directory for one in done])
