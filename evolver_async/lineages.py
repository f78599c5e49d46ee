"""Lineages of weights: their forks, and the distance between two versions."""

from itertools import groupby

import msgspec

from evolver_async.schema import Trajectory, WeightId


class Fork(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Start of a lineage: it continues lineage `parent` from version `step`."""

    lineage: int
    parent: int
    step: int


def version_lag(head: WeightId, sampled: WeightId, forks: dict[int, Fork]) -> int:
    """Count the versions between `sampled` and `head`, by way of their common ancestor.

    Within one lineage this is `head.step - sampled.step`; across a fork at step f it is
    `(head.step - f) + (sampled.step - f)`, or `head.step - sampled.step` where `sampled` is an
    ancestor. Parents have smaller numbers than their children, and lineage 0 is the root. If
    lineage 2 continues lineage 1 from step 5, the lag of 1.6 to the head 2.7 is 2 + 1 = 3.
    """
    ancestor = min(head.step, sampled.step)
    ours, theirs = head.lineage, sampled.lineage
    while ours != theirs:
        fork = forks[max(ours, theirs)]
        ancestor = min(ancestor, fork.step)
        ours, theirs = (fork.parent, theirs) if ours > theirs else (ours, fork.parent)
    return (head.step - ancestor) + (sampled.step - ancestor)


def ends(trajectory: Trajectory) -> list[WeightId]:
    """Return the oldest and newest weights of the ACTION tokens in each lineage, ascending.

    Past a fork it is the newest ones that are the furthest from the head.
    """
    sampled = {run.weights for sequence in trajectory.sequences for run in sequence.versions}
    if len(sampled) < 2:
        return [*sampled]
    found: list[WeightId] = []
    for _, own in groupby(sorted(sampled), lambda weights: weights.lineage):
        oldest, *later = own
        found += [oldest, *later[-1:]]
    return found
