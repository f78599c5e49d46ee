"""Resampling on correct: members of an oversampled group that train (rStar2's GRPO-RoC). Pure.

Failures are drawn uniformly, so that all kinds of them train; of the successes those with the
fewest errors are kept. Formulas: docs/algorithms.md, Selection.
"""

import numpy as np
from msgspec.structs import replace

from evolver_async.randomness import key
from evolver_async.schema import Array, Group, Trajectory, TurnFlag

LEAST = 2  # members of either side that are kept where there are so many
NO_TOOL = 0.5  # error ratio of a member without tool calls
CLEAN = 1e-6  # `inverse`: added to a penalty, so that members without one come first


def resampled(group: Group, *, members: int, draw: str, seed: int) -> Group:
    """Reduce the group to `members` of its members (0, or more than it has: all), in their order.

    Correct are members that solved their task. `draw` lowest: the correct ones of the lowest
    `penalty`, earlier ones first among equals; inverse: drawn without replacement, weights
    1 / penalty. The others are drawn uniformly. Draws belong to `seed`, the group and its use.
    """
    trajectories = group.trajectories
    correct = [i for i, trajectory in enumerate(trajectories) if trajectory.success]
    wrong = [i for i, trajectory in enumerate(trajectories) if not trajectory.success]
    k_wrong, k_correct = counts(len(wrong), len(correct), members)
    rng = np.random.Generator(np.random.Philox(key=key(seed, "roc", group.group_id, group.use)))
    penalties = np.array([penalty(trajectories[i]) for i in correct])
    order = np.argsort(penalties, kind="stable")
    if draw == "inverse":
        # the smallest of exponential variables of these rates: draws without replacement
        order = np.argsort(rng.exponential(size=len(correct)) * (penalties + CLEAN))
    else:
        assert draw == "lowest", draw
    kept = {correct[i] for i in order[:k_correct]}
    kept |= {wrong[i] for i in rng.permutation(len(wrong))[:k_wrong]}
    return replace(group, trajectories=[trajectories[i] for i in sorted(kept)])


def counts(wrong: int, correct: int, members: int) -> tuple[int, int]:
    """Return the numbers of wrong and correct members to keep; `members` is 0 (all) or at least 4.

    k_wrong = clamp(round(wrong members / n), min(2, wrong), members - min(2, correct)), the rest
    correct; if one side has too few, the other takes its places.
    """
    size = min(members or wrong + correct, wrong + correct)
    k_wrong = round(wrong * size / (wrong + correct))
    k_wrong = max(min(LEAST, wrong), min(k_wrong, size - min(LEAST, correct)))
    k_wrong = min(max(k_wrong, size - correct), wrong)
    return k_wrong, size - k_wrong


def penalty(trajectory: Trajectory) -> float:
    """Return the tool-error ratio plus the format penalty, 0 to 2.

    Error ratio: of the turns that called tools the share with an error, 0.5 without any such turn.
    Format penalty: 1 without an answer, else the share of turns that were not well-formed and no
    such errors.
    """
    called = tool_calls(trajectory)
    errors = flagged(called, TurnFlag.TOOL_ERROR) if len(called) else NO_TOOL
    if not trajectory.terminated or not len(trajectory.turn_flags):
        return errors + 1.0
    both = TurnFlag.FORMAT_ERROR | TurnFlag.TOOL_ERROR
    return errors + float((trajectory.turn_flags & both == TurnFlag.FORMAT_ERROR).mean())


def tool_calls(trajectory: Trajectory) -> Array:
    """Return the flags of the turns that called a tool."""
    flags = trajectory.turn_flags
    return flags[(flags & TurnFlag.TOOL_CALL) != 0]


def flagged(flags: Array, flag: TurnFlag) -> float:
    """Return the share of turns with the flag; 0 without any turns."""
    return float(((flags & flag) != 0).mean()) if len(flags) else 0.0


def resampling_metrics(before: list[Group], after: list[Group]) -> dict[str, float]:
    """Count the members left out; measure the mean penalty of correct ones before and after.

    `before` holds the same groups as `after`, with all their members.
    """
    counts_of = [sum(len(group.trajectories) for group in groups) for groups in (before, after)]
    found = {"selection/members_left_out": float(counts_of[0] - counts_of[1])}
    for name, groups in (("all", before), ("kept", after)):
        penalties = [
            penalty(trajectory)
            for group in groups
            for trajectory in group.trajectories
            if trajectory.success
        ]
        if penalties:
            found[f"selection/penalty_{name}"] = float(np.mean(penalties))
    return found
