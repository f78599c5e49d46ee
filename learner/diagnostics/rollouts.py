"""What became of the groups of one take, and what the actors had brought. Pure."""

from dataclasses import dataclass, field

import numpy as np

from evolver_async.schema import Array, Group, TurnFlag
from learner.advantage.group_relative import zero_spread
from learner.data.batch import Batch, Minibatch
from learner.data.collate import guided
from learner.data.resampling import flagged, tool_calls

NON_FINITE = "non_finite"  # why groups were left out whose update could not be applied


@dataclass
class Outcome:
    """What became of the groups of one take. `updates` optimizer updates were applied."""

    trained: list[int]
    filtered: dict[str, list[int]]
    updates: int
    tokens: int
    metrics: dict[str, float]
    batch: Batch | None = None
    groups: list[Group] = field(default_factory=list)

    def rates(self, seconds: float) -> dict[str, float]:
        """Trained ACTION tokens and consumed groups a second, of a step that took `seconds`."""
        groups = len(self.trained) + sum(len(ids) for ids in self.filtered.values())
        return {
            "throughput/tokens_per_s": self.tokens / seconds,
            "throughput/groups_per_s": groups / seconds,
        }


@dataclass
class Applied:
    """The minibatches whose updates were applied, and the indices of groups that are in none."""

    minibatches: list[Minibatch]
    left_out: set[int]
    metrics: dict[str, float]

    @classmethod
    def of(
        cls, minibatches: list[Minibatch], applied: list[Minibatch], metrics: dict[str, float]
    ) -> "Applied":
        return cls(applied, _groups(minibatches) - _groups(applied), metrics)

    def outcome(
        self,
        groups: list[Group],
        filtered: dict[str, list[int]],
        metrics: dict[str, float],
        batch: Batch | None,
    ) -> Outcome:
        left_out = [groups[index].group_id for index in sorted(self.left_out)]
        trained = [group.group_id for group in groups if group.group_id not in left_out]
        return Outcome(
            trained,
            filtered | ({NON_FINITE: left_out} if left_out else {}),
            len(self.minibatches),
            sum(minibatch.tokens for minibatch in self.minibatches),
            metrics,
            batch,
            groups,
        )


def _groups(minibatches: list[Minibatch]) -> set[int]:
    """The indices of the groups that have members in these minibatches."""
    return {int(index) for m in minibatches for index in m.batch.group_P[m.members]}


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """What the actors brought, before selection."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([trajectory.reward for trajectory in trajectories])
    group_P = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    turns = np.array([len(trajectory.turn_rewards) for trajectory in trajectories])
    flags = np.concatenate([trajectory.turn_flags for trajectory in trajectories])
    calls = np.concatenate([tool_calls(trajectory) for trajectory in trajectories])
    return {
        "train/reward_mean": float(rewards.mean()),
        "train/reward_std": float(rewards.std()),
        "train/success": float(np.mean([trajectory.success for trajectory in trajectories])),
        "train/turns_mean": float(turns.mean()),
        "train/format_errors": flagged(flags, TurnFlag.FORMAT_ERROR),
        "train/tool_errors": flagged(calls, TurnFlag.TOOL_ERROR),
        "train/zero_spread": float(zero_spread(rewards, group_P).mean()),
    }


def env_metrics(groups: list[Group]) -> dict[str, float]:
    """The success in each environment, before selection; none of one that is not in the step."""
    by_env: dict[str, list[bool]] = {}
    for group in groups:
        successes = [trajectory.success for trajectory in group.trajectories]
        by_env.setdefault(group.task.env, []).extend(successes)
    return {f"train/success/{env}": float(np.mean(found)) for env, found in by_env.items()}


def experience_metrics(groups: list[Group]) -> dict[str, float]:
    """Who was guided, and what came of it; before selection.

    guided_gain: mean over groups that have both kinds of how much more of the guided succeed.
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
    """By group: the mean of x (0 without any), and how many there are."""
    counts_G = np.bincount(group, minlength=groups)
    return np.bincount(group, weights=x, minlength=groups) / np.maximum(counts_G, 1), counts_G
