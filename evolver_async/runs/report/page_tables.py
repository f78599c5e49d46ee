"""Tables of the page, as plain values."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from evolver_async.runs.results.trajectories import RecordedTrajectory


class Link(NamedTuple):
    """Text that leads to `href`; without one it is plain."""

    text: str
    href: str


@dataclass
class Table:
    """A table with a title; cells are numbers, text, or lists of links."""

    title: str
    head: list[str]
    rows: list[list[Any]]


def fates_table(
    trajectories: Sequence[RecordedTrajectory],
) -> tuple[Table, dict[str, float]]:
    """Return the means of trajectories by kind and fate, and their numbers by the same labels."""
    parts: dict[tuple[str, str], list[RecordedTrajectory]] = defaultdict(list)
    for one in trajectories:
        fate = f"{one.fate}: {one.reason}" if one.reason else one.fate
        parts[one.kind, fate].append(one)
    rows, counts = [], {}
    for (kind, fate), members in sorted(parts.items(), key=lambda part: -len(part[1])):
        counts[f"{kind}, {fate}"] = float(len(members))
        turns = [one.turns for one in members if one.turns is not None]
        rows.append(
            [
                kind,
                fate,
                len(members),
                round(fmean(one.tokens for one in members), 1),
                round(fmean(turns), 2) if turns else "–",
                round(fmean(one.reward for one in members), 3),
                round(fmean(one.success for one in members), 3),
            ]
        )
    head = ["kind", "fate", "trajectories", "mean tokens", "mean turns", "mean reward", "success"]
    return Table("Trajectories of the journal by kind and fate", head, rows), counts
