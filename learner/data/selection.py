"""Selection of the groups and members that train, or of pairs. Pure; reports what is left out.

Works on complete groups before collation. Formulas: docs/algorithms.md, Selection.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import index

import numpy as np
from msgspec.structs import replace

from evolver_async.config import SelectionConfig
from evolver_async.errors import TrainingError
from evolver_async.extension import Builtins, is_own
from evolver_async.randomness import key
from evolver_async.rewards import spread as spread_of
from evolver_async.schema import Array, Group, Role, Trajectory, TurnFlag
from learner.data.players import TRUNCATED

# The indices of the groups that train, from all groups of a step and their reward spreads.
Selection = Callable[[list[Group], list[float], SelectionConfig], set[int]]
SELECTIONS: Builtins[Selection] = Builtins("selection.kind")  # `all` needs none
LEAST = 2  # members of either side that resampling keeps where there are so many
NO_TOOL = 0.5  # error ratio of a member without tool calls
CLEAN = 1e-6  # `inverse`: added to a penalty, so that members without one come first
TOLERANCE = 1e-9  # of sums of floats that are compared with a share of themselves


@dataclass(frozen=True)
class Selected:
    """Groups that train, in their order, and the ids of the others by reason.

    kept: the indices of these groups among all; None if `selection.kind` did not choose them.
    """

    groups: list[Group]
    filtered: dict[str, list[int]]
    kept: list[int] | None = None


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
    if settings.kind == "all":
        return Selected(groups, {})
    kept = _kept(groups, settings)
    filtered: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        if i not in kept:
            zero = drops_zero(settings) and spread_by(group, settings.by) == 0
            filtered.setdefault("zero_spread" if zero else settings.kind, []).append(group.group_id)
    chosen = [groups[i] for i in sorted(kept)]
    if "members" in settings.facts.reads:
        chosen = [
            resampled(group, members=settings.members, draw=settings.draw, seed=seed)
            for group in chosen
        ]
    return Selected(chosen, filtered, sorted(kept))


def select_beside_rows(groups: list[Group], settings: SelectionConfig, *, seed: int) -> Selected:
    """Choose among the groups of an rl step, some of which can be rows of files.

    Trajectories of logs are chosen as played ones are. Recorded conversations, which come last,
    always train: they have no outcome to compare. Rows that were left out have nothing to train.
    """
    left = trainable([group for group in groups if group.task.origin == "recorded"])
    fit = {group.group_id: group for group in left.groups}
    written = [group for group in left.groups if group.trajectories[0].policy == "recorded"]
    out = {group.group_id for group in written} | {n for ids in left.filtered.values() for n in ids}
    places = [place for place, group in enumerate(groups) if group.group_id not in out]
    compared = [fit.get(groups[place].group_id, groups[place]) for place in places]
    found = select(compared, settings, seed=seed) if compared else Selected([], {})
    kept = found.kept and [places[index] for index in found.kept]
    return Selected([*found.groups, *written], left.filtered | found.filtered, kept)


def advantage_scale(settings: SelectionConfig, share: float) -> float:
    """Return the factor of advantages for the share of groups that is left."""
    return {"none": 1.0, "linear": share, "sqrt": math.sqrt(share)}[settings.scale]


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


def pairs(groups: list[Group], by: str = "reward", *, masked: bool = False) -> Selected:
    """Reduce each group to the members of most and of least reward, the first of equals.

    Filtered groups: `zero_spread`, all rewards are equal, or with `by` success all successes;
    `no_tokens`, one of the two members has no token to train; `truncated`, with `masked`: at most
    one member is not overlong.
    """
    kept: list[Group] = []
    filtered: dict[str, list[int]] = {}
    for group in groups:
        if masked:
            members = [one for one in group.trajectories if not one.overlong]
            if len(members) < min(2, len(group.trajectories)):
                filtered.setdefault(TRUNCATED, []).append(group.group_id)
                continue
            group = replace(group, trajectories=members)
        best = min(group.trajectories, key=lambda one: (-one.reward, one.member))
        worst = min(group.trajectories, key=lambda one: (one.reward, one.member))
        if min(spread_by(group, by), spread_by(group, "reward")) == 0:
            filtered.setdefault("zero_spread", []).append(group.group_id)
        elif not (_trains(best) and _trains(worst)):
            filtered.setdefault("no_tokens", []).append(group.group_id)
        else:
            pair = sorted((best, worst), key=lambda one: one.member)
            kept.append(replace(group, trajectories=pair))
    return Selected(kept, filtered)


def trainable(groups: list[Group], *, masked: bool = False) -> Selected:
    """Reduce each group to the members that train by themselves; reasons as of `pairs`."""
    kept: list[Group] = []
    filtered: dict[str, list[int]] = {}
    for group in groups:
        whole = [one for one in group.trajectories if not (masked and one.overlong)]
        if members := [one for one in whole if _trains(one)]:
            kept.append(replace(group, trajectories=members))
        else:
            why = "no_tokens" if whole else TRUNCATED
            filtered.setdefault(why, []).append(group.group_id)
    return Selected(kept, filtered)


def _trains(trajectory: Trajectory) -> bool:
    """Return True if some ACTION token has a context, with experience or without."""
    contexts = (s.roles[s.roles != Role.EXPERIENCE] for s in trajectory.sequences)
    return any((roles[1:] == Role.ACTION).any() for roles in contexts)


def resampled(group: Group, *, members: int, draw: str, seed: int) -> Group:
    """Reduce the group to `members` of its members (0, or more than it has: all), in their order.

    rStar2's GRPO-RoC: failures are drawn uniformly, so that all kinds of them train; of the
    successes those with the fewest errors are kept.

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
    correct.
    """
    size = min(members or wrong + correct, wrong + correct)
    k_wrong = round(wrong * size / (wrong + correct))
    k_wrong = max(min(LEAST, wrong), min(k_wrong, size - min(LEAST, correct)))
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
