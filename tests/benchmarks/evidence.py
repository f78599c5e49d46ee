"""Tables and picture of the evidence study, written into docs/evidence.md and docs/evolving.md.

    python tests/benchmarks/evidence.py runs/evidence [--results FILE] [--page FILE]

Reads a directory of `evolver-async study evidence`, finished or not, and replaces the text between
the markers of both files; the picture comes to lie beside the page. `make evidence` does both.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from evidence_cells import NOTHING, Evidence, amount, at_equal_steps, evidence_of

from evolver_async.config import ConfigError
from evolver_async.study import directory, plots
from evolver_async.study.directory import Study
from evolver_async.study.run_results import RunResult, results_of
from evolver_async.study.summary import (
    CellSummary,
    cells_summary,
    evaluated_on,
    final_difference,
    shown,
)

ROOT = Path(__file__).parents[2]
OPENING, CLOSING = "<!-- evidence -->", "<!-- /evidence -->"
METRIC = "eval/success"
MAIN = ("none", "Q", "N", "A", "QN", "QA", "all")  # variants of the picture
PICTURE = "evidence.png"
NEAR = 0.9  # of the best value of `sparse`
EQUAL = "at equal steps"
SHORT = ("variant", "seeds", "success", "difference", EQUAL, "environment steps", "ratio")
COLUMNS = 100  # of a line of text


def row_of(one: Evidence, first: Evidence | None) -> dict[str, str]:
    """Return the row of a cell by column; `first` is the first cell, None if it is missing."""
    summary, difference, ratio, equal = one.summary, NOTHING, NOTHING, NOTHING
    if first is one:
        difference = "baseline"
    elif first is not None:
        found = final_difference(summary, first.summary)
        difference = shown(found, sign="+")
        if 1 < found.count < summary.final.count:
            difference += f" ({found.count} pairs)"
        equal = shown(at_equal_steps(one, first), sign="+")
    if first is not None:
        ratio = one.env_steps.over(first.env_steps)
    return {
        "variant": f"`{one.name}`",
        "seeds": f"{summary.finished} of {len(summary.results)}",
        "success": shown(summary.final),
        "difference": difference,
        EQUAL: equal,
        "mean of the curve": shown(summary.area),
        "environment steps": one.env_steps.text,
        "ratio": ratio,
        "RL steps": one.steps.text,
        "wasted, last": shown(one.wasted_last),
        "wasted, mean": shown(one.wasted_mean),
        "freed": shown(one.freed),
    }


def table(rows: Sequence[dict[str, str]], columns: Sequence[str]) -> str:
    """Return rows as a Markdown table of some columns."""
    lines = [columns, ["---"] * len(columns), *([row[name] for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def state(study: Study, results: Sequence[RunResult], missing: Sequence[str]) -> str:
    """Return in words which runs are finished, and what is missing."""
    seeds = ", ".join(map(str, study.definition.seeds))
    done = sum(one.state == "finished" for one in results)
    said = (
        "`make evidence` (`configs/studies/evidence.yaml`), from one cold start a seed, seeds"
        f" {seeds}: {done} of {len(results)} runs are finished."
    )
    for words, names in (
        ("Failed", [one.run.name for one in results if one.state == "failed"]),
        ("Missing, without a finished seed", missing),
    ):
        if names:
            said += f" {words}: {', '.join(f'`{name}`' for name in names)}."
    return said


def meaning(study: Study, first: str) -> str:
    """Return what the columns of both tables mean."""
    threshold = study.definition.threshold.value
    return (
        f"Success is that of the greedy policy on held-out tasks, never guided (`{METRIC}`), at the"
        " end; intervals are 95 % (Student t) over the finished seeds. The difference is that of"
        f" the success to `{first}`, seed by seed; at equal steps, the same at the number of"
        f" environment steps that `{first}` has taken at its end. Environment steps count from the"
        f" cold start until the mean curve over the finished seeds is at {threshold:g}, linear"
        f" between evaluations; the ratio is that to `{first}`'s, a bound if one of both is"
        " never there."
    )


DETAILS = (
    "RL steps are counted likewise; the mean of the curve is over all of them. Wasted is"
    " `guidance/wasted`, the share of the guided groups that were guided while the mean gain was at"
    " most 0, at the end and on average; freed is the mean of `boost/freed_fraction`. A dash stands"
    " for what a variant does not have."
)


def judged(found: dict[str, Evidence]) -> Iterator[str]:
    """Yield the comparison of judged turns with sparse rewards, if both variants are there."""
    if not {"sparse", "sparse_A"} <= found.keys():
        return
    sparse, judge = found["sparse"], found["sparse_A"]
    level = NEAR * max(one.mean for one in sparse.curve.values)
    amounts = {one.name: amount(one.curve, level) for one in (sparse, judge)}
    yield (
        f"Judged turns: environment steps until the mean curve is at {level:.3f},"
        f" {100 * NEAR:.0f} % of the best value of `sparse`'s."
    )
    rows = [
        {
            "variant": f"`{name}`",
            "environment steps": one.text,
            "ratio": one.over(amounts["sparse"]),
        }
        for name, one in amounts.items()
    ]
    yield table(rows, list(rows[0]))


def own_tasks(found: dict[str, Evidence], first: str) -> Iterator[str]:
    """Yield how far a variant comes on tasks of its own making alone, if it is there."""
    if not {"only_own", first} <= found.keys():
        return
    own, base = (found[name].summary.final.mean for name in ("only_own", first))
    if base > 0:
        yield (
            f"On tasks of its own making alone, `only_own` ends at {own:.3f}:"
            f" {100 * own / base:.0f} % of the {base:.3f} of `{first}`."
        )


def texts(study: Study) -> tuple[str, str, list[CellSummary]]:
    """Return the text of the results, that of the page, and the cells of the picture.

    Raises ConfigError if the study is another one, or if no run is finished.
    """
    if study.definition.threshold.metric != METRIC or not study.definition.cold_start:
        raise ConfigError(f"{study.out}: needs a cold start and a threshold of {METRIC}")
    results = results_of(study)
    cells = cells_summary(study, results)
    measured = [evidence_of(cell, study.definition.threshold.value) for cell in cells]
    found = {one.name: one for one in measured if one is not None}
    if not found:
        raise ConfigError(f"{study.out}: no run is finished")
    first = cells[0].cell.name
    said = state(study, results, [name for cell in cells if (name := cell.cell.name) not in found])
    rows = [row_of(one, found.get(first)) for one in found.values()]
    means = " ".join([meaning(study, first), *evaluated_on(results)])
    full = [said, table(rows, list(rows[0])), f"{means} {DETAILS}"]
    full += [*judged(found), *own_tasks(found, first)]
    short = [said, table(rows, SHORT), means]
    drawn = [found[name].summary for name in MAIN if name in found]
    if drawn:
        picture = f"![Success on held-out tasks by environment steps]({PICTURE})"
        short += [picture, "Means over the finished seeds; bands are the intervals."]
    return paragraphs(full), paragraphs(short), drawn


def paragraphs(parts: Sequence[str]) -> str:
    """Join paragraphs, with lines of text that are not too long."""
    whole = ("|", "!")  # tables and pictures
    return "\n\n".join(
        part if part.startswith(whole) else textwrap.fill(part, COLUMNS, break_on_hyphens=False)
        for part in parts
    )


def replaced(path: Path, text: str) -> str:
    """Return the text of a file with `text` between its markers. Raises ConfigError."""
    before, opening, rest = path.read_text(encoding="utf-8").partition(OPENING)
    _, closing, after = rest.partition(CLOSING)
    if not (opening and closing) or OPENING in rest or CLOSING in before + after:
        raise ConfigError(f"{path}: needs {OPENING} once and {CLOSING} once after it")
    return f"{before}{opening}\n{text}\n{closing}{after}"


def write(path: Path, text: str) -> None:
    """Replace a file at once."""
    part = path.with_name(f".{path.name}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("study", type=Path, metavar="DIR")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "evidence.md")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "evolving.md")
    args = parser.parse_args()
    try:
        study = directory.existing(args.study)
        if study is None:
            raise ConfigError(f"{args.study}: is not the directory of a study")
        full, short, drawn = texts(study)
        results, page = replaced(args.results, full), replaced(args.page, short)
    except (ConfigError, OSError) as error:
        print(f"evidence: {error}", file=sys.stderr)
        return 2
    if drawn:
        plots.draw_curves(args.page.parent / PICTURE, drawn, "env_steps", METRIC)
    write(args.results, results)
    write(args.page, page)
    print(full)
    return 0


if __name__ == "__main__":
    sys.exit(main())
