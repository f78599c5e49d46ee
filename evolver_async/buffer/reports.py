"""Checks of a DONE against the take that it reports."""

from evolver_async.schema import WeightId
from evolver_async.wire.messages import Done


def fates_of(request: Done) -> dict[int, str]:
    """The outcome of every group that a DONE names: "trained" or the filter's reason."""
    fates = dict.fromkeys(request.trained, "trained")
    for reason, groups in request.filtered.items():
        fates |= dict.fromkeys(groups, reason)
    return fates


def mismatch(
    fates: dict[int, str], taken: list[int], request: Done, head: WeightId | None
) -> str | None:
    """The error of a DONE about its take, None if there is none.

    Only a skipped take may leave groups out.
    """
    count = len(request.trained) + sum(len(groups) for groups in request.filtered.values())
    if count != len(fates):
        return f"trained, filtered: a group twice in take {request.take}"
    if "trained" in request.filtered:
        return "filtered: 'trained' is no reason"
    foreign = sorted(fates.keys() - set(taken))
    if foreign:
        return f"trained, filtered: groups {foreign} are not of take {request.take}"
    left_out = sorted(set(taken) - fates.keys())
    if left_out and not request.skipped:
        return f"trained, filtered: groups {left_out} of take {request.take} are missing"
    if head is not None and request.version < head.step:
        return f"version: {request.version}, it was {head.step}"
    if request.episodes < 0:
        return f"episodes: {request.episodes}"
    return None
