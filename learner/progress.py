"""Where a run stands: how long it has trained, and when a stage is over."""

import time

from evolver_async.config import Stage
from learner.state import State, Watched


class Clock:
    """Counts seconds of training into a `State`; what passes before `skip` is not counted."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def tick(self, state: State) -> float:
        """Seconds since the last call; adds them to the run's and to the stage's."""
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        state.seconds += passed
        state.stage_seconds += passed
        return passed

    def skip(self) -> None:
        self.last = time.perf_counter()

    def seconds(self, state: State) -> float:
        """Seconds of training of the run until now."""
        return state.seconds + time.perf_counter() - self.last


def stage_over(stage: Stage, state: State) -> bool:
    """Whether the first of the stage's limits is reached."""
    return (
        0 < stage.steps <= state.take - state.stage_take
        or 0 < stage.tokens <= state.stage_tokens
        or 0 < stage.hours * 3600 <= state.stage_seconds
        or 0 < stage.until_success <= state.eval_success
    )


def next_stage(state: State) -> None:
    """What is counted, or remembered, by stage begins anew."""
    state.stage += 1
    state.stage_take = state.take
    state.stage_tokens = 0
    state.stage_seconds = 0.0
    state.eval_success = -1.0
    state.empty_steps = 0
    state.masked_steps = 0
    state.watched = Watched()
