"""Writing of a study's tables, summary and plots from the metrics of its runs, at any time."""

from evolver_async.study import estimate, plots, summary, tables
from evolver_async.study.cells import cold_stages
from evolver_async.study.directory import Study
from evolver_async.study.estimate import START_S, RunEstimate, StudyEstimate
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


def expected(study: Study) -> StudyEstimate:
    """Return the time and disk of a run by those that are finished, else by the recipe's sizes."""
    configs = [*study.configs.values()]
    first, cold = 0, None
    if study.definition.cold_start:
        first = cold_stages(study.configs)
        cold = estimate.rough(configs[:1], end=first)
    return StudyEstimate(_measured(study) or estimate.rough(configs, first), cold)


def _measured(study: Study) -> RunEstimate | None:
    done = [one for one in results_of(study) if one.state == "finished" and one.last is not None]
    durations = [one.last.seconds + START_S for one in done if one.last is not None]
    return estimate.measured(durations, [one.run.directory for one in done])
