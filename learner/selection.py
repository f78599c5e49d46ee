"""Which groups of a step train. Pure; what is left out is reported by reason.

Works on complete groups before collation.
"""

from dataclasses import dataclass

import numpy as np

from evolver_async.schema import Group


@dataclass(frozen=True)
class Selected:
    """The groups that train, in the order they came, and the ids of the others by reason."""

    groups: list[Group]
    filtered: dict[str, list[int]]


def reward_spread(group: Group) -> float:
    """Population std of the members' rewards; exactly 0 when they are all the same."""
    rewards_G = np.array([trajectory.reward for trajectory in group.trajectories])
    # std of equal numbers can come out as 1e-17, which would not count as zero
    return float(rewards_G.std()) if np.ptp(rewards_G) > 0 else 0.0


def select(groups: list[Group], kind: str, *, keep: float, drop_zero: bool) -> Selected:
    """Chooses the groups that train.

    `all` keeps every group. `spread` (StarPO-S) keeps the share `keep` of all groups with the
    largest in-group reward std, at least one, earlier groups first among equals; with `drop_zero`
    none whose members all have the same reward. Reasons: `zero_spread`, `spread`.
    """
    if kind == "all":
        return Selected(groups, {})
    assert kind == "spread", kind
    spreads = [reward_spread(group) for group in groups]
    count = max(1, round(keep * len(groups)))
    ranked = sorted(range(len(groups)), key=lambda i: -spreads[i])
    kept = {i for i in ranked[:count] if spreads[i] > 0 or not drop_zero}
    filtered: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        if i not in kept:
            reason = "zero_spread" if drop_zero and spreads[i] == 0 else "spread"
            filtered.setdefault(reason, []).append(group.group_id)
    return Selected([groups[i] for i in sorted(kept)], filtered)
