"""Which rows of metrics.jsonl form the newest lineage's curve.

A resumed run repeats steps under a new lineage. The pair (lineage, step) tells the rows of takes
apart, and likewise the rows of evaluations.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Mark(NamedTuple):
    """What tells a row from the others. `take`: False for the row of an evaluation."""

    lineage: int
    step: int
    take: bool


def mark(row: Mapping[str, Any]) -> Mark:
    """The mark of a row of metrics.jsonl."""
    return Mark(int(row["lineage"]), int(row["step"]), "stage_kind" in row)


def supersedes(new: Mark, old: Mark) -> bool:
    """True if `new` replaces `old`, a row of an older lineage.

    A take replaces everything from its step on, an evaluation only the same step's evaluation.
    """
    if new.lineage <= old.lineage:
        return False
    return old.step >= new.step if new.take else not old.take and old.step == new.step


def current(marks: Iterable[Mark]) -> list[int]:
    """The positions of the marks that no other one supersedes, in their order."""
    listed = list(marks)
    forks: dict[int, int] = {}  # the least step of a lineage's takes
    evaluated: dict[int, int] = {}  # the newest lineage with an evaluation of a step
    for one in listed:
        if one.take:
            forks[one.lineage] = min(one.step, forks.get(one.lineage, one.step))
        else:
            evaluated[one.step] = max(one.lineage, evaluated.get(one.step, one.lineage))
    bounds: dict[int, float] = {}  # the first step of a lineage that newer ones replace
    bound = float("inf")
    for lineage in sorted({one.lineage for one in listed}, reverse=True):
        bounds[lineage] = bound
        bound = min(bound, forks.get(lineage, bound))
    return [
        index
        for index, one in enumerate(listed)
        if one.step < bounds[one.lineage] and (one.take or evaluated[one.step] == one.lineage)
    ]


def current_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the newest lineage's curve, in their order."""
    listed = list(rows)
    return [listed[index] for index in current(map(mark, listed))]
