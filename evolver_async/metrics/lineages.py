"""The rows of metrics.jsonl that form the newest lineage's curve.

A resumed run repeats steps under a new lineage. The pair (lineage, step) tells the rows of takes
apart, and likewise the rows of evaluations.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple


class Mark(NamedTuple):
    """The identity of a row. `kind`: of a take, of an evaluation, or of neither."""

    lineage: int
    step: int
    kind: Literal["take", "eval", "other"]


def mark(row: Mapping[str, Any]) -> Mark:
    """The mark of a row of metrics.jsonl."""
    kind = "take" if "stage_kind" in row else "eval" if "eval/episodes" in row else "other"
    return Mark(int(row["lineage"]), int(row["step"]), kind)


def supersedes(new: Mark, old: Mark) -> bool:
    """True if `new` replaces `old`, a row of an older lineage.

    A take replaces everything from its step on, another row only the same step's row of its kind.
    """
    if new.lineage <= old.lineage:
        return False
    if new.kind == "take":
        return old.step >= new.step
    return (old.step, old.kind) == (new.step, new.kind)


def current(marks: Iterable[Mark]) -> list[int]:
    """The positions of the marks that no other one supersedes, in their order."""
    listed = list(marks)
    forks: dict[int, int] = {}  # the least step of a lineage's takes
    newest: dict[tuple[int, str], int] = {}  # the newest lineage with such a row of a step
    for one in listed:
        if one.kind == "take":
            forks[one.lineage] = min(one.step, forks.get(one.lineage, one.step))
        same = (one.step, one.kind)
        newest[same] = max(one.lineage, newest.get(same, one.lineage))
    bounds: dict[int, float] = {}  # the first step of a lineage that newer ones replace
    bound = float("inf")
    for lineage in sorted({one.lineage for one in listed}, reverse=True):
        bounds[lineage] = bound
        bound = min(bound, forks.get(lineage, bound))
    return [
        index
        for index, one in enumerate(listed)
        if one.step < bounds[one.lineage] and newest[one.step, one.kind] == one.lineage
    ]


def current_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the newest lineage's curve, in their order."""
    listed = list(rows)
    return [listed[index] for index in current(map(mark, listed))]
