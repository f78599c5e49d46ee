"""A row of metrics and histograms after every step, and sometimes a few trajectories as text."""

import logging
from pathlib import Path

from evolver_async.config import Config
from evolver_async.metrics.activity import ActorShares
from evolver_async.metrics.writer import Metrics, Timers
from evolver_async.model import policy
from learner.diagnostics.samples import drop_oldest, write_samples
from learner.diagnostics.step_result import StepResult
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
