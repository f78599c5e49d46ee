"""Metrics of the groups of one take. Pure."""

from collections.abc import Sequence

import numpy as np

from evolver_async.config import Config
from evolver_async.rewards import alike, term_means
from evolver_async.schema import FAILED_CALL, Array, Group, TurnFlag
from learner.data.batch import Batch
from learner.data.collate import guided
from learner.data.resampling import flagged, tool_calls

UNREADABLE = np.uint8(TurnFlag.FORMAT_ERROR | FAILED_CALL)


def taken_metrics(stage: Config, groups: list[Group]) -> dict[str, float]:
    """Measure the groups before selection."""
    metrics = rollout_metrics(groups) | length_metrics(groups) | own_metrics(groups)
    if stage.reward.terms:
        metrics |= reward_metrics(groups, [term.called for term in stage.reward.terms])
    if stage.experience.kind != "none":
        metrics |= experience_metrics(groups)
    if stage.tasks.mixture or stage.tasks.path:
        metrics |= env_metrics(groups)
    return metrics


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Measure rewards, success, turns and their errors."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([trajectory.reward for trajectory in trajectories])
    turns = np.array([len(trajectory.turn_rewards) for trajectory in trajectories])
    flags = np.concatenate([trajectory.turn_flags for trajectory in trajectories])
    calls = np.concatenate([tool_calls(trajectory) for trajectory in trajectories])
    of_groups = [[trajectory.reward for trajectory in group.trajectories] for group in groups]
    members_alike = sum(len(one) for one in of_groups if alike(one))
    return {
        "train/reward_mean": float(rewards.mean()),
        "train/reward_std": float(rewards.std()),
        "train/success": float(np.mean([trajectory.success for trajectory in trajectories])),
        "train/turns_mean": float(turns.mean()),
        "train/format_errors": flagged(flags, TurnFlag.FORMAT_ERROR),
        "train/unreadable_calls": float(np.mean(flags & UNREADABLE == UNREADABLE)),
        "train/invalid_actions": flagged(flags, TurnFlag.INVALID_ACTION),
        "train/tool_errors": flagged(calls, TurnFlag.TOOL_ERROR),
        "train/zero_spread": members_alike / len(rewards),
    }


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


def copied_metrics(batch: Batch) -> dict[str, float]:
    """Measure the share of guided trajectories that keep their context; {} without any."""
    if not batch.guided_P.any():
        return {}
    return {"experience/kept_copied": float(batch.copied_P[batch.guided_P].mean())}


def _means(x: Array, group: Array, groups: int) -> tuple[Array, Array]:
    """Return by group the mean of x (0 without any) and the count."""
    counts_G = np.bincount(group, minlength=groups)
    return np.bincount(group, weights=x, minlength=groups) / np.maximum(counts_G, 1), counts_G
