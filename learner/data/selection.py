"""Selection of the groups and members that train. Pure; groups that are left out are reported.

Works on complete groups before collation. Formulas: docs/algorithms.md, Selection.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import index

import numpy as np

from evolver_async.config import SelectionConfig
from evolver_async.errors import TrainingError
from evolver_async.extension import Builtins, is_own
from evolver_async.rewards import spread as spread_of
from evolver_async.schema import Group
from learner.data.resampling import resampled, resampling_metrics

# The indices of the groups that train, from all groups of a step and their reward spreads.
Selection = Callable[[list[Group], list[float], SelectionConfig], set[int]]
SELECTIONS: Builtins[Selection] = Builtins("selection.kind")
TOLERANCE = 1e-9  # of sums of floats that are compared with a share of themselves


@dataclass(frozen=True)
class Selected:
    """Groups that train, in their order, and the ids of the others by reason.

    scale: factor of advantages for the share of groups that is left.
    """

    groups: list[Group]
    filtered: dict[str, list[int]]
    scale: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)


def reward_spread(group: Group) -> float:
    """Return the population std of the members' rewards; exactly 0 if all are equal."""
    return spread_of([trajectory.reward for trajectory in group.trajectories])


def spread_by(group: Group, by: str) -> float:
    """Return the spread that `selection.by` compares: of rewards, or of successes as 0 and 1."""
    if by == "reward":
        return reward_spread(group)
    assert by == "success", by
    return spread_of([float(trajectory.success) for trajectory in group.trajectories])


def select(groups: list[Group], settings: SelectionConfig, *, seed: int) -> Selected:
    """Choose the groups that train by their spread, the std of rewards or successes within them.

    `settings.by` success: reward terms that shape, such as a length, spread the rewards of groups
    that failed throughout; these do not train then. Advantages still compare rewards.

    Reasons of those left out: `zero_spread` (all members have equal rewards, or successes; with
    `drop_zero`, or where the kind says so), else the kind. `seed`: of the draws among members.
    """
    kept = _kept(groups, settings)
    filtered: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        if i not in kept:
            zero = drops_zero(settings) and spread_by(group, settings.by) == 0
            filtered.setdefault("zero_spread" if zero else settings.kind, []).append(group.group_id)
    chosen = [groups[i] for i in sorted(kept)]
    share = len(chosen) / len(groups)
    metrics = {"selection/kept_share": share}
    if "members" in settings.facts.reads:
        before = chosen
        chosen = [
            resampled(group, members=settings.members, draw=settings.draw, seed=seed)
            for group in before
        ]
        metrics |= resampling_metrics(before, chosen)
    scale = {"none": 1.0, "linear": share, "sqrt": math.sqrt(share)}[settings.scale]
    return Selected(chosen, filtered, scale, metrics)


def _kept(groups: list[Group], settings: SelectionConfig) -> set[int]:
    """Return the indices of the groups that `selection.kind` keeps.

    Raises TrainingError, which names the key, if an own function returns anything else, such as a
    truth value for each group.
    """
    spreads = [spread_by(group, settings.by) for group in groups]
    found = SELECTIONS.of(settings.kind)(groups, spreads, settings)
    if not is_own(settings.kind):
        return found
    try:
        kept = {-1 if isinstance(one, bool) else index(one) for one in found}
    except TypeError:
        kept = {-1}
    if not kept <= set(range(len(groups))):
        raise TrainingError(
            f"selection.kind: {settings.kind} must return indices of groups, from 0 to"
            f" {len(groups) - 1}, and returned {repr(found)[:100]}"
        )
    return kept


def drops_zero(settings: SelectionConfig) -> bool:
    """Return True if groups without spread never train; some kinds imply it."""
    return settings.drop_zero or settings.facts.drops_zero


@SELECTIONS("all")
def everything(groups: list[Group], spreads: list[float], settings: SelectionConfig) -> set[int]:
    """Return all indices."""
    return set(range(len(groups)))


@SELECTIONS("spread")
def spread(groups: list[Group], spreads: list[float], settings: SelectionConfig) -> set[int]:
    """Return the indices of the share `keep` of all groups with the largest spread."""
    most = max(1, round(settings.keep * len(spreads)))
    return _with_spread(_ranked(spreads)[:most], spreads, settings)


@SELECTIONS("top_k")
def top_k(groups: list[Group], spreads: list[float], settings: SelectionConfig) -> set[int]:
    """Return the indices of the `k` groups with the largest spread."""
    return _with_spread(_ranked(spreads)[: settings.k], spreads, settings)


@SELECTIONS("min_p")
def min_p(groups: list[Group], spreads: list[float], settings: SelectionConfig) -> set[int]:
    """Return the indices of the groups with at least `p` of the largest spread."""
    least = settings.p * max(spreads) * (1 - TOLERANCE)
    return _with_spread([i for i in _ranked(spreads) if spreads[i] >= least], spreads, settings)


@SELECTIONS("top_p")
def top_p(groups: list[Group], spreads: list[float], settings: SelectionConfig) -> set[int]:
    """Return the indices of the fewest groups whose spreads sum up to `p` of all."""
    ranked = _ranked(spreads)
    before = np.cumsum([0.0] + [spreads[i] for i in ranked])
    enough = settings.p * before[-1] * (1 - TOLERANCE)
    kept = [i for i, sum_before in zip(ranked, before, strict=False) if sum_before < enough]
    return _with_spread(kept, spreads, settings)


@SELECTIONS("resample_on_correct")
@SELECTIONS("dynamic")
def with_spread(groups: list[Group], spreads: list[float], settings: SelectionConfig) -> set[int]:
    """Return the indices of the groups whose members' rewards differ."""
    return _with_spread(_ranked(spreads), spreads, settings)


def _ranked(spreads: list[float]) -> list[int]:
    """Return all indices, the largest spread first; earlier groups come first among equals."""
    return sorted(range(len(spreads)), key=lambda i: -spreads[i])


def _with_spread(kept: list[int], spreads: list[float], settings: SelectionConfig) -> set[int]:
    return {i for i in kept if spreads[i] > 0 or not drops_zero(settings)}
