"""Where a run stands: how long it has trained, and when a stage is over."""

import time

from evolver_async.config import Stage
from evolver_async.config.sections.run import limit_reached
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
    return limit_reached(
        stage,
        steps=state.take - state.stage_take,
        tokens=state.stage_tokens,
        seconds=state.stage_seconds,
        success=state.eval_success,
    )


def reopen(stages: list[Stage], state: State) -> None:
    """Go on with a finished run whose last stage has become longer, or is no longer the last."""
    if not state.finished:
        return
    if not stage_over(stages[state.stage], state):
        state.finished = False
    elif state.stage + 1 < len(stages):
        state.finished = False
        next_stage(state)


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
    state.rollbacks = 0
