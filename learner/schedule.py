"""Schedule of a run: configurations of its stages, their ends, and the time of training."""

import time
from dataclasses import replace

from evolver_async.config import Config, StageConfig
from evolver_async.config.load import stage_config
from evolver_async.config.sections.run import SUPERVISED, limits_reached
from learner.state import LearnerState, Watched


class Stages:
    """Configuration of every stage as the learner scores with it, also after rollbacks.

    Demonstrations were written, not sampled: their log-probs are those of temperature 1.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._made: dict[tuple[int, int], Config] = {}

    def __call__(self, index: int, rollbacks: int = 0) -> Config:
        """Return that of stage `index` after so many rollbacks."""
        if (index, rollbacks) not in self._made:
            stage = stage_config(self.config, index, rollbacks)
            rows_alone = stage.data.path and self.config.stages[index].kind != "rl"
            if self.config.stages[index].kind in SUPERVISED or rows_alone:
                stage = replace(stage, rollout=replace(stage.rollout, temperature=1.0))
            self._made[index, rollbacks] = stage
        return self._made[index, rollbacks]


class Clock:
    """Counter of seconds of training in a `LearnerState`; time before `skip` does not count."""

    def __init__(self) -> None:
        self.last = self.step = time.perf_counter()  # last count; end of the last step

    def tick(self, state: LearnerState) -> float:
        """Count the time until the end of a step; return the seconds since the end before it."""
        self.count(state)
        passed, self.step = self.last - self.step, self.last
        return passed

    def count(self, state: LearnerState) -> None:
        """Add the seconds since the last count to the run's and to the stage's."""
        now = time.perf_counter()
        state.seconds += now - self.last
        state.stage_seconds += now - self.last
        self.last = now

    def skip(self) -> None:
        self.last = self.step = time.perf_counter()

    def seconds(self, state: LearnerState) -> float:
        """Return seconds of training of the run until now."""
        return state.seconds + time.perf_counter() - self.last


def stage_over(stage: StageConfig, state: LearnerState) -> bool:
    """Return True if the first of the stage's limits is reached."""
    reached = limits_reached(
        stage,
        steps=state.stage_step,
        tokens=state.stage_tokens,
        seconds=state.stage_seconds,
        success=state.eval_success,
    )
    return bool(reached)


def reopen(stages: list[StageConfig], state: LearnerState) -> None:
    """Continue a finished run whose last stage has become longer, or is no longer the last."""
    if not state.finished:
        return
    if not stage_over(stages[state.stage], state):
        state.finished = False
    elif state.stage + 1 < len(stages):
        state.finished = False
        next_stage(state)


def next_stage(state: LearnerState) -> None:
    """Begin the next stage: reset counters and memory that belong to a stage."""
    state.stage += 1
    state.stage_take = state.take
    state.stage_tokens = 0
    state.stage_seconds = 0.0
    state.eval_success = -1.0
    state.baseline = 0.0
    state.watched = Watched()
    state.rollbacks = 0
