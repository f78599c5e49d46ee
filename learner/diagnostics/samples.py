"""Samples of a step: trajectories as JSON lines, with the log-probs and advantages of tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from evolver_async.schema import Role, Sequence
from learner.diagnostics.step_result import Trained


def write_samples(path: Path, tokenizer: Any, data: Trained, count: int) -> None:
    """Write `count` trajectories, spread evenly over the batch.

    A line holds the text, the outcome, the labels, and for each ACTION token its behaviour and
    learner log-prob (`logprobs`; `anchor_logprobs`: those at the start of the step, without
    stripped experience), the weight of its correction (`ratios`) and its advantage.
    """
    groups, batch = data.groups, data.batch
    path.parent.mkdir(exist_ok=True)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    tasks = [group.task.task_id for group in groups for _ in group.trajectories]
    picks = np.flatnonzero(batch.length_P)
    picks = picks[np.linspace(0, len(picks) - 1, min(count, len(picks))).astype(int)]
    with path.open("w") as lines:
        for index in picks.tolist():
            trajectory = trajectories[index]
            mine_N = batch.trajectory_N == index
            anchor_N = data.logprobs.anchor_N[mine_N]
            row = {
                "trajectory": trajectory.trajectory_id,
                "task": tasks[index],
                "actor": trajectory.actor,
                "reward": trajectory.reward,
                "success": trajectory.success,
                "turn_rewards": trajectory.turn_rewards.tolist(),
                "labels": trajectory.labels.tolist(),
                "label_source": trajectory.label_source,
                "stripped": bool(batch.stripped_P[index]),
                "text": [
                    part
                    for sequence in trajectory.sequences
                    for part in _parts(sequence, tokenizer)
                ],
                "lags": batch.lag_N[mine_N].tolist(),
                "logprobs": batch.mu_N[mine_N].tolist(),
                "anchor_logprobs": anchor_N.tolist(),
                "ratios": np.exp(anchor_N - data.logprobs.old_N[mine_N]).tolist(),
                "advantages": data.advantage_N[mine_N].tolist(),
            }
            lines.write(json.dumps(row) + "\n")


def _parts(sequence: Sequence, tokenizer: Any) -> list[tuple[str, str]]:
    """Cut the sequence into (role, text) runs."""
    cuts = np.flatnonzero(np.diff(sequence.roles)) + 1
    return [
        (Role(int(roles[0])).name, tokenizer.decode(tokens.tolist()))
        for roles, tokens in zip(
            np.split(sequence.roles, cuts), np.split(sequence.tokens, cuts), strict=True
        )
    ]
