"""Metrics of the groups of one take, and the signals of them that alarms watch. Pure."""

from collections.abc import Sequence

import numpy as np

from evolver_async.config import Config
from evolver_async.rewards import alike, player_means, term_means
from evolver_async.schema import FAILED_CALL, Array, Group, Role, TurnFlag
from learner.data.collate import guided
from learner.data.selection import flagged, reward_spread, tool_calls

UNREADABLE = np.uint8(TurnFlag.FORMAT_ERROR | FAILED_CALL)


def taken_metrics(stage: Config, groups: list[Group], split: list[Group]) -> dict[str, float]:
    """Measure the groups before selection. `split`: those of the players.

    Rows beside them tell nothing of the policy, and of rows alone there is no outcome.
    """
    played, rows = played_and_rows(groups)
    metrics = row_metrics(rows, len(groups)) if stage.data.weight else {}
    groups = played or groups
    metrics |= length_metrics(groups) | own_metrics(groups)
    if played:
        metrics |= rollout_metrics(played)
    if stage.rollout.players:
        metrics |= player_metrics(groups, played_and_rows(split)[0] or split)
    if stage.reward.terms:
        metrics |= reward_metrics(groups, [term.called for term in stage.reward.terms])
    if stage.experience.kind != "none":
        metrics |= experience_metrics(groups)
    if stage.tasks.mixture or stage.tasks.path:
        metrics |= env_metrics(groups)
    return metrics


def played_and_rows(groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """Return the groups that were played, and those that are rows of files."""
    rows = [group for group in groups if group.task.origin == "recorded"]
    return [group for group in groups if group.task.origin != "recorded"], rows


def row_metrics(rows: list[Group], groups: int) -> dict[str, float]:
    """Measure the rows among the `groups` of an rl step: their share, and of trajectories of logs
    the outcomes."""
    found = {"data/share": len(rows) / groups}
    trajectories = [one for group in rows for one in group.trajectories]
    found["data/conversations"] = float(sum(one.policy == "recorded" for one in trajectories))
    if logged := [one for one in trajectories if one.policy == "logged"]:
        found["data/trajectories"] = float(len(logged))
        found["data/reward_mean"] = float(np.mean([one.reward for one in logged]))
        found["data/success"] = float(np.mean([one.success for one in logged]))
    return found


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Measure rewards, success, turns and their errors."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([trajectory.reward for trajectory in trajectories])
    turns = np.array([len(trajectory.turn_rewards) for trajectory in trajectories])
    flags = np.concatenate([trajectory.turn_flags for trajectory in trajectories])
    calls = np.concatenate([tool_calls(trajectory) for trajectory in trajectories])
    return {
        "train/reward_mean": float(rewards.mean()),
        "train/reward_std": float(rewards.std()),
        "train/success": float(np.mean([trajectory.success for trajectory in trajectories])),
        "train/turns_mean": float(turns.mean()),
        "train/format_errors": flagged(flags, TurnFlag.FORMAT_ERROR),
        "train/unreadable_calls": float(np.mean(flags & UNREADABLE == UNREADABLE)),
        "train/invalid_actions": flagged(flags, TurnFlag.INVALID_ACTION),
        "train/tool_errors": flagged(calls, TurnFlag.TOOL_ERROR),
        "train/zero_spread": _share_alike(groups),
    }


def player_metrics(groups: list[Group], split: list[Group]) -> dict[str, float]:
    """Measure the outcomes of every player over the episodes that have one of it.

    Rewards are compared within the groups that advantages compare them in, those of `split`.
    """
    metrics = {"train/zero_spread": _share_alike(split)}
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns: dict[str, list[int]] = {}
    for player in (player for one in trajectories for player in one.players):
        turns.setdefault(player.name, []).append(len(player.turns))
    for name, found in turns.items():
        metrics[f"player/{name}/turns_mean"] = float(np.mean(found))
        metrics[f"player/{name}/trained_groups"] = 0.0
    return metrics | player_means(trajectories)


def _share_alike(groups: list[Group]) -> float:
    """Return the share of trajectories in groups whose rewards are all equal."""
    of_groups = [[trajectory.reward for trajectory in group.trajectories] for group in groups]
    return sum(len(one) for one in of_groups if alike(one)) / sum(map(len, of_groups))


def reward_metrics(groups: list[Group], names: Sequence[str]) -> dict[str, float]:
    """Measure the mean of each reward term, without its weight, and of the terms `names` that
    abstained the share of trajectories from which they did."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    metrics = {f"train/reward/{name}": value for name, value in term_means(trajectories).items()}
    for name in names:
        if lacking := sum(name not in one.terms for one in trajectories):
            metrics[f"train/abstained/{name}"] = lacking / len(trajectories)
    return metrics


def length_metrics(groups: list[Group]) -> dict[str, float]:
    """Measure lengths in ACTION tokens, and what limits of tokens and of turns cut off."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    lengths = [trajectory.action_tokens for trajectory in trajectories]
    flags = np.concatenate([trajectory.turn_flags for trajectory in trajectories])
    return {
        "train/length": float(np.mean(lengths)),
        "train/length_max": float(max(lengths)),
        "train/truncated": float(np.mean([one.truncated or one.overlong for one in trajectories])),
        "train/cut_turns": flagged(flags, TurnFlag.CUT),
        "train/cut_observations": flagged(flags, TurnFlag.OBSERVATION_CUT),
    }


def own_metrics(groups: list[Group]) -> dict[str, float]:
    """Average the numbers of the environments' own over the trajectories that have them."""
    found: dict[str, list[float]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            for name, value in trajectory.metrics.items():
                found.setdefault(f"env/{name}", []).append(value)
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}


def env_metrics(groups: list[Group]) -> dict[str, float]:
    """Measure the success in each environment that has groups in the step."""
    by_env: dict[str, list[bool]] = {}
    for group in groups:
        successes = [trajectory.success for trajectory in group.trajectories]
        by_env.setdefault(group.task.env, []).extend(successes)
    return {f"train/success/{env}": float(np.mean(found)) for env, found in by_env.items()}


def experience_metrics(groups: list[Group]) -> dict[str, float]:
    """Measure the share and the success of guided and unguided members.

    guided_gain: the difference of their success, averaged over groups that have both kinds.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    group_P = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    guided_P = np.array([guided(trajectory) for trajectory in trajectories], bool)
    success_P = np.array([trajectory.success for trajectory in trajectories], np.float64)
    metrics = {"experience/retrieved_share": float(guided_P.mean())}
    if guided_P.any():
        metrics["experience/guided_success"] = float(success_P[guided_P].mean())
    if not guided_P.all():
        metrics["experience/unguided_success"] = float(success_P[~guided_P].mean())
    (with_G, counts_with_G), (without_G, counts_without_G) = (
        _means(success_P[kind_P], group_P[kind_P], len(groups)) for kind_P in (guided_P, ~guided_P)
    )
    both_G = (counts_with_G > 0) & (counts_without_G > 0)
    if both_G.any():
        metrics["experience/guided_gain"] = float((with_G - without_G)[both_G].mean())
    return metrics


def _means(x: Array, group: Array, groups: int) -> tuple[Array, Array]:
    """Return by group the mean of x (0 without any) and the count."""
    counts_G = np.bincount(group, minlength=groups)
    return np.bincount(group, weights=x, minlength=groups) / np.maximum(counts_G, 1), counts_G


def group_signals(groups: list[Group]) -> dict[str, float]:
    """Return signals that alarms watch, of the groups with several members before selection.

    reward_spread: mean over groups of the population std of the rewards. zero_groups: share of
    groups in which it is 0. input_dependence: see there.
    """
    several = [group for group in groups if len(group.trajectories) > 1]
    if not several:
        return {}
    spreads = np.array([reward_spread(group) for group in several])
    signals = {"reward_spread": float(spreads.mean()), "zero_groups": float((spreads == 0).mean())}
    turns: list[list[Array]] = []
    for group in several:
        firsts = [trajectory.sequences[0] for trajectory in group.trajectories]
        found = [one.tokens[(one.roles == Role.ACTION) & (one.turns == 0)] for one in firsts]
        turns.append([tokens for tokens in found if len(tokens)])
    turns = [group for group in turns if len(group) > 1]
    if len(turns) > 1:
        signals["input_dependence"] = input_dependence(turns)
    return signals


def input_dependence(turns: list[list[Array]]) -> float:
    """Return the share of first turns' variation that lies between prompts, about 0 to 1.

    `turns`: by group (at least two, each of one prompt), by member (at least two), the tokens that
    it wrote. With h_i the histogram of member i's tokens, as shares,

        same  = mean of h_i·h_j over pairs of members of one group, averaged over groups
        cross = mean of m_x·m_y over pairs of groups, m_x the mean histogram of group x
        own   = mean of h_i·h_i, averaged over groups
        dependence = (same - cross) / (own - cross)

    the intraclass correlation (Fisher) of token histograms; the terms are unbiased, because no pair
    holds the same member twice. It stands for the mutual information of prompt and action; RAGEN-2
    scores actions under each other's prompts: that takes forward passes, and a plug-in
    estimate out of a group's few members would be mostly bias. 0: members of a group resemble each
    other no more than those of others, or everybody writes the same; 1: the prompt decides all.
    """
    members_G = np.array([len(group) for group in turns])
    group_M = np.repeat(np.arange(len(turns)), members_G)
    lengths_M = np.array([len(tokens) for group in turns for tokens in group])
    vocabulary, flat = np.unique(
        np.concatenate([tokens for group in turns for tokens in group]), return_inverse=True
    )
    kinds = len(vocabulary)
    pairs, counts = np.unique(  # (member, token), so that no array is members times tokens
        np.repeat(np.arange(len(group_M)), lengths_M) * kinds + flat, return_counts=True
    )
    member, kind = np.divmod(pairs, kinds)
    shares = counts / lengths_M[member]
    own_G = np.bincount(group_M[member], weights=shares**2, minlength=len(turns))
    sums_GV = np.bincount(
        group_M[member] * kinds + kind, weights=shares, minlength=len(turns) * kinds
    ).reshape(len(turns), kinds)
    same = ((sums_GV**2).sum(1) - own_G) / (members_G * (members_G - 1))
    own = own_G / members_G
    means_GV = sums_GV / members_G[:, None]
    groups = len(turns)
    squares = (means_GV**2).sum()
    cross = float((means_GV.sum(0) ** 2).sum() - squares) / (groups * (groups - 1))
    varies = float(np.mean(own)) - cross
    return (float(np.mean(same)) - cross) / varies if varies > 1e-9 else 0.0
