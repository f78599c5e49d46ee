"""Lineages of weights: their forks, and the distance between two versions."""

import msgspec

from evolver_async.schema import WeightId


class Fork(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Start of a lineage: it continues lineage `parent` from version `step`."""

    lineage: int
    parent: int
    step: int


def version_lag(head: WeightId, sampled: WeightId, forks: dict[int, Fork]) -> int:
    """Count the versions between `sampled` and `head`, by way of their common ancestor.

    Within one lineage this is `head.step - sampled.step`; across a fork at step f it is
    `(head.step - f) + (sampled.step - f)`, or `head.step - sampled.step` where `sampled` is an
    ancestor. Parents have smaller numbers than their children, and lineage 0 is the root.
    """
    ancestor = min(head.step, sampled.step)
    ours, theirs = head.lineage, sampled.lineage
    while ours != theirs:
        fork = forks[max(ours, theirs)]
        ancestor = min(ancestor, fork.step)
        ours, theirs = (fork.parent, theirs) if ours > theirs else (ours, fork.parent)
    return (head.step - ancestor) + (sampled.step - ancestor)
