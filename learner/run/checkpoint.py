"""Checkpoints of one run: writing, retention, resumption and rollback.

The newest are kept, from which a crash is resumed, and those that `config.Checkpoint` asks for.
"""

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from evolver_async.buffer.stages import evaluation_digest
from evolver_async.checkpoint import checkpoints as checkpoint
from evolver_async.checkpoint import history
from evolver_async.checkpoint.history import CheckpointEvaluation
from evolver_async.config import Config
from evolver_async.config.load import stage_config
from evolver_async.errors import TrainingError
from evolver_async.wire.evaluation_results import EvalResult
from learner.state import LearnerState, PendingEvaluation


class Checkpoints:
    """Checkpoints in <run>/checkpoints."""

    def __init__(
        self, run_dir: Path, config: Config, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._written_s = clock()  # time of the last one, or of the start
        self.directory = run_dir / "checkpoints"
        self.run_id = run_dir.name
        self.settings = config.checkpoint
        stages = [stage_config(config, index) for index in range(len(config.stages))]
        # computed once for a stage, as a file of tasks is read for it
        self._digest = cache(lambda stage: evaluation_digest(stages[stage]))
        self._rolls_back = any(stage.safety.action == "rollback" for stage in stages)
        safeties = [stage.safety for stage in stages]
        self._patience = max(max(one.patience, one.format_patience) for one in safeties)
        self._staleness = max(stage.buffer.max_staleness for stage in stages)

    def newest(self) -> Path | None:
        """Return the newest valid one; None in a fresh run. CheckpointError if none is left."""
        if not checkpoint.exists(self.directory):
            return None
        newest = checkpoint.load_newest(self.directory, self.run_id)
        history.finish_going_back(self.directory, newest)
        return newest[0]

    def untouched(self, newest: Path) -> CheckpointEvaluation | None:
        """Return the result of an evaluation of the model before the first step; None if this
        checkpoint is of a later one, or was not evaluated."""
        return history.evaluation_of(newest) if history.numbers(newest)["take"] == 0 else None

    def due(self, take: int, evaluated: bool) -> bool:
        """Return True if one is due at `take`; `evaluated`: an evaluation of it was asked for."""
        minutes = self.settings.minutes
        if minutes and self._clock() - self._written_s >= 60 * minutes:
            return True
        every = (self.settings.every, self.settings.keep_every)
        return any(n and take % n == 0 for n in every) or (
            evaluated and self.settings.keep_best > 0
        )

    def write(self, state: LearnerState, fill: Callable[[Path], object]) -> None:
        """Let `fill` write one of `state` into an empty directory, and drop old ones."""
        checkpoint.save(
            self.directory,
            state.take,
            fill,
            run_id=self.run_id,
            keep=self.settings.keep,
            lasting=self._lasting(state),
        )
        self._written_s = self._clock()

    def kept(self) -> tuple[int, int]:
        """Return the oldest take that a resume may need, and the bytes of the newest checkpoint."""
        found = checkpoint.distinct(checkpoint.resumable(self.directory))
        manifests = [manifest for _, manifest in found]
        oldest = min(manifest.step for manifest in manifests[-self.settings.keep :])
        return oldest, sum(file.bytes for file in manifests[-1].files.values())

    def evaluated(self, result: EvalResult, asked: PendingEvaluation) -> None:
        """Note the result of an evaluation beside the checkpoints of its weights."""
        evaluation = CheckpointEvaluation(
            success=result.success,
            episodes=result.episodes,
            digest=self._digest(asked.stage),
        )
        for path in self._with_weights({asked.changed_take}):
            history.note(path, evaluation)

    def go_back(self, state: LearnerState, suspicious: int) -> Path:
        """Make an earlier one of this stage the newest, with one more rollback counted.

        Candidates are those without a suspicious alarm whose policy acted before the last
        `suspicious` steps; the best evaluated one is taken, or the last if none was evaluated.
        TrainingError if there is none.
        """
        good = self._unsuspected(state.stage)
        if not good:
            raise TrainingError(
                f"{self.directory}: every checkpoint of the stage is suspicious;"
                " resume an earlier one with train --resume --step"
            )
        chosen = self._chosen(good, state.take - suspicious)
        change = {"rollbacks": state.rollbacks + 1}
        return history.go_back(self.directory, chosen, lambda numbers: numbers.update(change))

    def _lasting(self, state: LearnerState) -> set[Path]:
        """Return those to keep besides the newest."""
        found = checkpoint.valid(self.directory)
        lasting = set(history.best(found)[: self.settings.keep_best])
        if self.settings.keep_best:
            lasting |= set(self._with_weights({asked.changed_take for asked in state.pending}))
            # the untouched model is the one to compare with, however much better others become
            first = [path for path, manifest in history.distinct(found) if manifest.step == 0]
            lasting |= {path for path in first if history.evaluation_of(path) is not None}
        if every := self.settings.keep_every:
            steps = [(path, manifest.step) for path, manifest in history.distinct(found)]
            lasting |= {path for path, step in steps if step and step % every == 0}
        if self._rolls_back and (good := self._unsuspected(state.stage)):
            before = state.take - self._patience
            # The oldest that no alarm could go back to yet follows, when one can: until then
            # frequent ones would all be dropped. Those that were left take no place of a best one.
            later = good[len(self._seen(good, before)) :]
            lasting |= {self._chosen(good, before), *later[:1]}
            lasting |= set(self._ranked()[: self.settings.keep_best])
        return lasting

    def _with_weights(self, takes: set[int]) -> list[Path]:
        """Return those of the present line whose weights last changed at one of these takes."""
        return [path for path, numbers in self._line() if numbers["changed_take"] in takes]

    def _unsuspected(self, stage: int) -> list[Path]:
        """Return those of the present line and stage without a suspicious alarm, oldest first."""
        return [
            path
            for path, numbers in self._line()
            if numbers["stage"] == stage and not any(numbers["watched"]["suspicious"].values())
        ]

    def _chosen(self, good: list[Path], take: int) -> Path:
        """Return the one of `good` to go back to if the steps from `take` on are suspicious."""
        seen = self._seen(good, take) or good[:1]
        return next((path for path in self._ranked() if path in seen), seen[-1])

    def _ranked(self) -> list[Path]:
        """Return the evaluated ones of the present line, best first."""
        return history.best(checkpoint.resumable(self.directory))

    def _line(self) -> list[tuple[Path, dict[str, Any]]]:
        """Return those of the present line, oldest first, each with the learner's numbers."""
        found = [path for path, _ in checkpoint.resumable(self.directory)]
        return [(path, numbers) for path in found if (numbers := history.numbers(path))]

    def _seen(self, paths: list[Path], take: int) -> list[Path]:
        """Return those whose policy sampled data that was trained before `take`."""
        latest = take - 1 - self._staleness
        return [path for path in paths if history.numbers(path)["take"] <= latest]
