"""Selection of the rows of metrics.jsonl that form the newest lineage's curve.

A resumed run repeats steps under a new lineage. The pair (lineage, step) tells the rows of takes
apart, and likewise the rows of evaluations.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple


class RowKey(NamedTuple):
    """Identity of a row; `kind` is that of a take, of an evaluation, or neither."""

    lineage: int
    step: int
    kind: Literal["take", "eval", "other"]


def key_of(row: Mapping[str, Any]) -> RowKey:
    """Return the key of a row of metrics.jsonl."""
    kind = "take" if "stage_kind" in row else "eval" if "eval/episodes" in row else "other"
    return RowKey(int(row["lineage"]), int(row["step"]), kind)


def supersedes(new: RowKey, old: RowKey) -> bool:
    """True if `new` replaces `old`, a row of an older lineage.

    A take replaces everything from its step on, another row only the same step's row of its kind.
    """
    if new.lineage <= old.lineage:
        return False
    if new.kind == "take":
        return old.step >= new.step
    return (old.step, old.kind) == (new.step, new.kind)


def current(keys: Iterable[RowKey]) -> list[int]:
    """Return the positions of the keys that no other one supersedes, in their order."""
    listed = list(keys)
    forks: dict[int, int] = {}  # least step of a lineage's takes
    newest: dict[tuple[int, str], int] = {}  # newest lineage with a row of this step and kind
    for one in listed:
        if one.kind == "take":
            forks[one.lineage] = min(one.step, forks.get(one.lineage, one.step))
        same = (one.step, one.kind)
        newest[same] = max(one.lineage, newest.get(same, one.lineage))
    bounds: dict[int, float] = {}  # first step of a lineage that newer ones replace
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
    """Return the rows of the newest lineage's curve, in their order."""
    listed = list(rows)
    return [listed[index] for index in current(map(key_of, listed))]
