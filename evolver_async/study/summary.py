"""The summary of a study in words and tables: `summary.md`.

Means are over finished runs only, and every row says how many these are. Differences are against
the baseline, and effects of a key are within each level of the other swept keys.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from evolver_async.metrics.families import bounds_of
from evolver_async.study.cells import Cell
from evolver_async.study.definition import Definition
from evolver_async.study.directory import Study
from evolver_async.study.run_results import MEANS, RunResult
from evolver_async.study.statistics import (
    Interval,
    Reach,
    equivalence,
    interval,
    mean_by_seed,
    paired,
    reach,
)

LEVEL = 0.05  # of the test for equivalence
AMOUNTS = {"step": "steps", "env_steps": "environment steps", "seconds": "seconds"}


@dataclass(frozen=True)
class CellSummary:
    """Statistics of a cell over its runs that count."""

    cell: Cell
    metric: str  # that of the threshold
    results: Sequence[RunResult]  # of all seeds
    finals: dict[int, float]  # by seed
    final: Interval
    best: Interval
    area: Interval
    reached: dict[str, Reach]
    means: dict[str, Interval]

    @property
    def finished(self) -> int:
        """Number of runs that count."""
        return sum(result.counts for result in self.results)


@dataclass(frozen=True)
class Effect:
    """Difference of final values that a value of a swept key makes, paired by seed.

    `level`: the values of the other swept keys, the same on both sides; None for the mean over all
    levels.
    """

    value: str
    level: dict[str, str] | None
    difference: Interval


def cells_summary(study: Study, results: Sequence[RunResult]) -> list[CellSummary]:
    """Return the statistics of every cell, in the order of the cells."""
    return [
        _of_cell(cell, [one for one in results if one.run.cell == cell], study.definition)
        for cell in study.cells
    ]


def _of_cell(cell: Cell, results: Sequence[RunResult], definition: Definition) -> CellSummary:
    done = [result for result in results if result.counts]
    bounds = bounds_of(definition.threshold.metric)
    reached = [result.to_threshold(definition.threshold.value) for result in done]
    return CellSummary(
        cell=cell,
        metric=definition.threshold.metric,
        results=results,
        finals={one.run.seed: one.final for one in done if one.final is not None},
        final=interval([one.final for one in done if one.final is not None], bounds=bounds),
        best=interval([one.best.value for one in done if one.best is not None], bounds=bounds),
        area=interval([one.area for one in done if one.area is not None], bounds=bounds),
        reached={name: reach([one[name] for one in reached]) for name in AMOUNTS},
        means={
            name: interval(
                [mean for one in done if (mean := one.means[name]) is not None],
                bounds=bounds_of(name),
            )
            for name in MEANS
        },
    )


def final_difference(cell: CellSummary, baseline: CellSummary) -> Interval:
    """Return the mean difference of the final values over the seeds that both have."""
    return _difference(cell.metric, [*paired(cell.finals, baseline.finals).values()])


def _difference(metric: str, pairs: Sequence[float]) -> Interval:
    low, high = bounds_of(metric)
    return interval(pairs, bounds=(low - high, high - low))


def effects(cells: Sequence[CellSummary], baseline: Cell, key: str) -> Iterator[Effect]:
    """Yield the effects of a swept key against its value in the baseline.

    For each other value these are the differences within each level of the other keys and, last,
    their mean, of the seeds that all levels have.
    """
    levels: dict[tuple[tuple[str, str], ...], dict[str, CellSummary]] = {}
    for one in cells:
        others = tuple((axis, value) for axis, value in one.cell.swept.items() if axis != key)
        levels.setdefault(others, {})[one.cell.swept[key]] = one
    reference = baseline.swept[key]
    for value in dict.fromkeys(one.cell.swept[key] for one in cells):
        both = {
            level: (found[value], found[reference])
            for level, found in levels.items()
            if value != reference and value in found and reference in found
        }
        for level, (one, other) in both.items():
            yield Effect(value, dict(level), final_difference(one, other))
        means = mean_by_seed([paired(one.finals, other.finals) for one, other in both.values()])
        if both:
            yield Effect(value, None, _difference(cells[0].metric, [*means.values()]))


def text(study: Study, results: Sequence[RunResult]) -> str:
    """Return the summary as Markdown."""
    definition, cells = study.definition, cells_summary(study, results)
    baseline = study.baseline
    seeds = ", ".join(map(str, definition.seeds))
    done = sum(result.state == "finished" for result in results)
    parts = [
        f"# Study of {definition.recipe}\n",
        f"{len(cells)} cells, seeds {seeds}: {done} of {len(results)} runs are finished. Intervals"
        f" are 95 % (Student t) over the finished seeds. {compared_with(baseline)}",
        *_open(results),
        f"\n## {definition.threshold.metric}\n",
        *_table(value_rows(cells, baseline, definition)),
        *(f"\n{sentence}" for sentence in evaluated_on(results)),
        *(
            line
            for key, rows in effect_tables(study, cells)
            for line in (f"\n## Effect of {key}\n", *_table(rows))
        ),
        f"\n## To {definition.threshold}\n",
        *_table(threshold_rows(cells)),
        "\n## Off-policy data (means over rl steps)\n",
        *_table(off_policy_rows(cells)),
    ]
    return "\n".join(parts) + "\n"


def compared_with(baseline: Cell) -> str:
    """Return the sentence on differences."""
    return (
        f"Differences are paired by seed against the baseline, `{baseline.name}`; effects are"
        " differences against its value of a key, with all other keys the same."
    )


def _open(results: Sequence[RunResult]) -> list[str]:
    """List the runs that failed, and those that are not finished."""
    lines = []
    failed = [result for result in results if result.state == "failed"]
    if failed:
        lines += ["\n## Failed runs\n", "No mean contains these runs.\n"]
        lines += [f"- `{one.run.name}`: {' '.join(one.error.split())}" for one in failed]
    waiting = [one.run.name for one in results if one.state in ("waiting", "unfinished")]
    if waiting:
        lines.append(f"\nNot finished: {', '.join(f'`{name}`' for name in waiting)}.")
    return lines


def evaluated_on(results: Sequence[RunResult]) -> list[str]:
    """Return a sentence on the different tasks of an evaluation; none if they are not known."""
    counts = sorted({one.distinct for one in results if one.distinct is not None})
    if not counts:
        return []
    count = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return [f"Last evaluation of a run: {count} distinct tasks."]


def value_rows(
    cells: Sequence[CellSummary], baseline: Cell, definition: Definition
) -> list[list[str]]:
    """Return the table of the metric: head, then a row for each cell."""
    margin = definition.equivalence
    against = next(one for one in cells if one.cell == baseline)
    head = ["cell", "runs", "final", "best", "area", "difference of final", "pairs"]
    rows = [head + [f"equivalent within {margin:g}"] * bool(margin)]
    for one in cells:
        row = [f"`{one.cell.name}`", f"{one.finished} of {len(one.results)}"]
        row += [shown(one.final), shown(one.best), shown(one.area)]
        if one is against:
            row += ["baseline", *[""] * (1 + bool(margin))]
        else:
            pairs = [*paired(one.finals, against.finals).values()]
            row += [shown(_difference(one.metric, pairs), sign="+"), str(len(pairs))]
            row += [_equivalent(pairs, margin)] * bool(margin)
        rows.append(row)
    return rows


def effect_tables(
    study: Study, cells: Sequence[CellSummary]
) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the swept keys with their tables, if there are several: else the cells tell it all."""
    swept = study.baseline.swept
    for key in swept if len(swept) > 1 else ():
        head, *rows = effect_rows(cells, study.baseline, key)
        if rows:
            yield key, [head, *rows]


def effect_rows(cells: Sequence[CellSummary], baseline: Cell, key: str) -> list[list[str]]:
    """Return the table of a key's effects: head, then a row for each value and level."""
    rows = [[f"{key}, against {baseline.swept[key]}", "level", "difference of final", "pairs"]]
    for one in effects(cells, baseline, key):
        level = "all" if one.level is None else ", ".join(f"{a}={b}" for a, b in one.level.items())
        rows.append([one.value, level, shown(one.difference, sign="+"), str(one.difference.count)])
    return rows


def _equivalent(differences: Sequence[float], margin: float) -> str:
    p = equivalence(differences, margin)
    if p is None:
        return "unknown (fewer than 2 pairs of numbers)"
    return f"{'yes' if p < LEVEL else 'not shown'} (TOST p = {p:.3f})"


def threshold_rows(cells: Sequence[CellSummary]) -> list[list[str]]:
    """Return the table of the amounts to the threshold: head, then a row for each cell."""
    rows = [["cell", *AMOUNTS.values()]]
    rows += [[f"`{one.cell.name}`", *(_amount(one, name) for name in AMOUNTS)] for one in cells]
    return rows


def _amount(cell: CellSummary, name: str) -> str:
    if cell.finished and not cell.finals:
        return f"metric {cell.metric} occurs in no finished run"
    if any(map(math.isnan, cell.reached[name].amounts)):
        return "not recorded"
    return shown_reach(cell.reached[name])


def off_policy_rows(cells: Sequence[CellSummary]) -> list[list[str]]:
    """Return the table of means over the rl steps: head, then a row for each cell."""
    rows = [["cell", *(f"`{name}`" for name in MEANS)]]
    rows += [[f"`{one.cell.name}`", *(shown(one.means[name]) for name in MEANS)] for one in cells]
    return rows


def shown(value: Interval, sign: str = "") -> str:
    """Return an interval as text, its ends if it is cut; a single value has none."""
    if value.count == 0:
        return "–"
    if math.isnan(value.mean):
        return "not a number"
    mean = f"{value.mean:{sign}.3f}"
    if value.half is None:
        return f"{mean} (one seed)"
    if value.is_cut:
        return f"{mean} ({value.low:{sign}.3f} to {value.high:{sign}.3f})"
    return f"{mean} ± {value.half:.3f}"


def shown_reach(value: Reach) -> str:
    """Return the mean amount if all runs reached the threshold, else the censoring.

    With censored runs the median is shown if fewer than half of the runs are censored.
    """
    count = len(value.amounts) + value.censored
    if count == 0:
        return "–"
    if value.censored == 0:
        found = interval(value.amounts)
        mean = amount_text(found.mean)
        return mean if found.half is None else f"{mean} ± {amount_text(found.half)}"
    unreached = f"not reached ({value.censored} of {count} seeds)"
    if 2 * value.censored < count:
        infinite = [float("inf")] * value.censored
        return f"{unreached}, median {amount_text(median([*value.amounts, *infinite]))}"
    return unreached


def amount_text(amount: float) -> str:
    """Return an amount with a decimal if it is small and not whole."""
    return f"{amount:.1f}" if amount < 100 and amount != int(amount) else f"{amount:.0f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]
