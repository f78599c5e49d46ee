"""Selection of the groups and members that train. Pure; groups that are left out are reported.

Works on complete groups before collation. Formulas: algorithms §8.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from evolver_async.config import SelectionConfig
from evolver_async.schema import Group
from learner.data.resampling import resampled, resampling_metrics

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
    """Return the population std of the members' rewards; exactly 0 if they are all the same."""
    rewards_G = np.array([trajectory.reward for trajectory in group.trajectories])
    # std of equal numbers can come out as 1e-17, which would not count as zero
    return float(rewards_G.std()) if np.ptp(rewards_G) > 0 else 0.0


def select(groups: list[Group], settings: SelectionConfig, *, seed: int) -> Selected:
    """Choose the groups that train by their spread, the std of rewards within them.

    `all` keeps every group. `spread` (StarPO-S) keeps the share `keep` of all groups with the
    largest spread, at least one, `top_k` the `k` groups; earlier groups come first among equals.
    `min_p` keeps groups with at least `p` of the largest spread. `top_p` keeps the fewest groups
    whose spreads sum up to `p` of all; `dynamic` (DAPO) those with any. `resample_on_correct`
    keeps some members of these. Reasons: `zero_spread` (all members have the same reward; with
    `drop_zero`, or where the kind says so), else the kind. `seed`: of the draws among members.
    """
    if settings.kind == "all":
        return Selected(groups, {})
    kept = kept_groups([reward_spread(group) for group in groups], settings)
    filtered: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        if i not in kept:
            zero = drops_zero(settings) and reward_spread(group) == 0
            filtered.setdefault("zero_spread" if zero else settings.kind, []).append(group.group_id)
    chosen = [groups[i] for i in sorted(kept)]
    share = len(chosen) / len(groups)
    metrics = {"selection/kept_share": share}
    if settings.kind == "resample_on_correct":
        before = chosen
        chosen = [
            resampled(group, members=settings.members, draw=settings.draw, seed=seed)
            for group in before
        ]
        metrics |= resampling_metrics(before, chosen)
    scale = {"none": 1.0, "linear": share, "sqrt": math.sqrt(share)}[settings.scale]
    return Selected(chosen, filtered, scale, metrics)


def drops_zero(settings: SelectionConfig) -> bool:
    """Return True if groups without spread never train; some kinds imply it."""
    return settings.drop_zero or settings.kind in ("top_p", "resample_on_correct", "dynamic")


def kept_groups(spreads: list[float], settings: SelectionConfig) -> set[int]:
    """Return the indices of the groups that a kind keeps by their spreads."""
    ranked = sorted(range(len(spreads)), key=lambda i: -spreads[i])
    if settings.kind == "spread":
        ranked = ranked[: max(1, round(settings.keep * len(spreads)))]
    elif settings.kind == "top_k":
        ranked = ranked[: settings.k]
    elif settings.kind == "min_p":
        least = settings.p * max(spreads) * (1 - TOLERANCE)
        ranked = [i for i in ranked if spreads[i] >= least]
    elif settings.kind == "top_p":
        before = np.cumsum([0.0] + [spreads[i] for i in ranked])
        enough = settings.p * before[-1] * (1 - TOLERANCE)
        ranked = [i for i, sum_before in zip(ranked, before, strict=False) if sum_before < enough]
    else:
        assert settings.kind in ("resample_on_correct", "dynamic"), settings.kind
    return {i for i in ranked if spreads[i] > 0 or not drops_zero(settings)}
