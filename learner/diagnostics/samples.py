"""Samples of a step: trajectories as JSON lines, with the log-probs and advantages of tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from evolver_async.files import make_own
from evolver_async.schema import Role, Sequence, Trajectory
from learner.diagnostics.step_result import Trained


def write_samples(path: Path, tokenizer: Any, data: Trained, count: int) -> None:
    """Write `count` trajectories, spread evenly over the batch; of an episode of several players
    each has its own.

    A line holds the text, the turn that each part of it belongs to, the outcome and its terms, the
    labels, the versions that sampled each turn, and for each ACTION token its behaviour and
    learner log-prob (`logprobs`; `anchor_logprobs`: those at the start of the step, without
    stripped experience), the weight of its correction (`ratios`) and its advantage.
    """
    groups, batch = data.groups, data.batch
    make_own(path.parent)
    unfinished = path.with_name(f".{path.name}")
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    tasks = [group.task.task_id for group in groups for _ in group.trajectories]
    picks = np.flatnonzero(batch.length_P)
    picks = picks[np.linspace(0, len(picks) - 1, min(count, len(picks))).astype(int)]
    with unfinished.open("w") as lines:
        for index in picks.tolist():
            trajectory = trajectories[index]
            parts = [p for sequence in trajectory.sequences for p in _parts(sequence, tokenizer)]
            mine_N = batch.trajectory_N == index
            anchor_N = data.logprobs.anchor_N[mine_N]
            row = {
                "trajectory": trajectory.trajectory_id,
                "player": trajectory.part,
                "task": tasks[index],
                "actor": trajectory.actor,
                "reward": trajectory.reward,
                "success": trajectory.success,
                "terms": trajectory.terms,
                "turn_rewards": trajectory.turn_rewards.tolist(),
                "labels": trajectory.labels.tolist(),
                "label_source": trajectory.label_source,
                "stripped": bool(batch.stripped_P[index]),
                "text": [(role, text) for role, text, _ in parts],
                "text_turns": [turn for _, _, turn in parts],
                "turn_versions": _versions(trajectory),
                "lags": batch.lag_N[mine_N].tolist(),
                "logprobs": batch.mu_N[mine_N].tolist(),
                "anchor_logprobs": anchor_N.tolist(),
                "ratios": np.exp(anchor_N - data.logprobs.old_N[mine_N]).tolist(),
                "advantages": data.advantage_N[mine_N].tolist(),
            }
            lines.write(json.dumps(row) + "\n")
    unfinished.replace(path)


def drop_oldest(directory: Path, limit_bytes: int) -> None:
    """Remove the samples that were written first until the others take at most `limit_bytes`.

    The newest ones stay. A time tells the order, as the steps of a lineage that the run has left
    can be larger.
    """
    found = [(path, path.lstat()) for path in directory.glob("step_*.jsonl")]
    found.sort(key=lambda one: one[1].st_mtime_ns)
    over = sum(facts.st_size for _, facts in found) - limit_bytes
    for path, facts in found[:-1]:
        if over <= 0:
            return
        path.unlink(missing_ok=True)
        over -= facts.st_size


def _parts(sequence: Sequence, tokenizer: Any) -> list[tuple[str, str, int]]:
    """Cut the sequence into runs of (role, text, turn); a context has the turn that it precedes."""
    action = sequence.roles == Role.ACTION
    changes = (np.diff(sequence.roles) != 0) | (np.diff(sequence.turns * action) != 0)
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    ends = [*starts[1:], len(action)]
    parts: list[tuple[str, str, int]] = []
    turn = int(sequence.turns.max())  # of a context after the last action
    for start, end in reversed(list(zip(starts.tolist(), ends, strict=True))):
        if action[start]:
            turn = int(sequence.turns[start])
        text = tokenizer.decode(sequence.tokens[start:end].tolist())
        parts.append((Role(int(sequence.roles[start])).name, text, turn))
    return parts[::-1]


def _versions(trajectory: Trajectory) -> list[list[str]]:
    """Return the weights that sampled each turn, in their order; none for a script."""
    found: list[dict[str, None]] = [{} for _ in trajectory.turn_rewards]
    for sequence in trajectory.sequences:
        turns = sequence.turns[sequence.roles == Role.ACTION]
        start = 0
        for run in sequence.versions:
            for turn in np.unique(turns[start : start + run.tokens]):
                found[turn].setdefault(str(run.weights))
            start += run.tokens
    return [list(names) for names in found]
