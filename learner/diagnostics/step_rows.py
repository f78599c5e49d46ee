"""A row of metrics and histograms after every step, and sometimes a few trajectories as text."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from evolver_async.config import Config
from evolver_async.files import make_own
from evolver_async.metrics.activity import ActorShares
from evolver_async.metrics.writer import Metrics, Timers
from evolver_async.model import policy
from evolver_async.schema import Role, Sequence, Trajectory
from learner.data.batch import UNKNOWN_LAG
from learner.diagnostics.measure import StepResult, Trained
from learner.state import LearnerState

log = logging.getLogger(__name__)


class StepRows:
    """Writer of the rows of one run. `timers`: drained into every row."""

    def __init__(self, config: Config, run_dir: Path, metrics: Metrics, timers: Timers) -> None:
        self.config = config
        self.run_dir = run_dir
        self.metrics = metrics
        self.timers = timers
        self.actors = ActorShares()
        self.tokenizer = policy.load_tokenizer(config.policy.path)

    def write(
        self,
        state: LearnerState,
        take: int,
        stage: int,
        outcome: StepResult,
        counters: dict[str, float],
        seconds: float,
        passed: float,
    ) -> None:
        """Write the samples of `take` where they are due, its histograms, and then its row.

        `state`: that of the next step. `seconds`: age of the run. `passed`: seconds since the end
        of the step before. Times of reporting and of checkpoints are in the next row, because they
        end after this one.
        """
        try:
            self._write_samples(state, take, outcome)
        except OSError as error:  # a full disk costs the samples, and not the run
            log.warning("no samples of step %d: %s", state.take, error)
        if outcome.histograms:
            self.metrics.log_histograms(state.take, outcome.histograms)
        self.metrics.progress = state.progress()
        times = self.timers.drain()
        self.metrics.log(
            state.take,
            {
                "time_s": seconds,
                "stage": float(stage),
                "stage_kind": self.config.stages[stage].kind,
                "version": float(state.version),
                **outcome.metrics,
                **self.actors.take_in(counters),
                **times,
                **self.timers.shares(),
                "weights/publish_s": times.get("time/publish_s", 0.0),
                **outcome.rates(passed),
            },
        )

    def _write_samples(self, state: LearnerState, take: int, outcome: StepResult) -> None:
        metrics = self.config.metrics
        path = self.run_dir / "samples" / f"step_{state.take:06d}.jsonl"
        if outcome.data is not None and metrics.samples and take % metrics.samples_every == 0:
            write_samples(path, self.tokenizer, outcome.data, metrics.samples)
            drop_oldest(path.parent, metrics.samples_bytes)
        else:
            path.unlink(missing_ok=True)  # of a lineage that the run has left


def write_samples(path: Path, tokenizer: Any, data: Trained, count: int) -> None:
    """Write `count` trajectories, spread evenly over the batch; of an episode of several players
    each has its own.

    A line holds the text, the turn that each part of it belongs to, the outcome and its terms, the
    labels, the versions that sampled each turn, and for each ACTION token its behaviour and
    learner log-prob (`logprobs`; `anchor_logprobs`: those at the start of the step, without
    stripped experience), the weight of its correction (`ratios`) and its advantage.
    """
    groups, batch, credit = data.chosen.groups, data.batch, data.credit
    assert batch is not None and credit is not None
    make_own(path.parent)
    unfinished = path.with_name(f".{path.name}")
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    tasks = [group.task.task_id for group in groups for _ in group.trajectories]
    picks = np.flatnonzero((batch.length_P > 0) & ~batch.written_P)
    picks = picks[np.linspace(0, len(picks) - 1, min(count, len(picks))).astype(int)]
    with unfinished.open("w") as lines:
        for index in picks.tolist():
            trajectory = trajectories[index]
            parts = [p for sequence in trajectory.sequences for p in _parts(sequence, tokenizer)]
            mine_N = batch.trajectory_N == index
            anchor_N = credit.logprobs.anchor_N[mine_N]
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
                "lags": [None if x == UNKNOWN_LAG else x for x in batch.lag_N[mine_N].tolist()],
                "logprobs": batch.mu_N[mine_N].tolist(),
                "anchor_logprobs": anchor_N.tolist(),
                "ratios": np.exp(anchor_N - credit.logprobs.old_N[mine_N]).tolist(),
                "advantages": credit.advantages.advantage_N[mine_N].tolist(),
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
