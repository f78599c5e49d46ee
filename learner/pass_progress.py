"""Progress within a step: the training thread counts its passes, the heartbeat's thread reads."""

import time
from collections.abc import Callable
from dataclasses import dataclass

BACKWARD = 3  # a forward and backward pass takes about as long as so many forward passes


class StepAbandoned(Exception):
    """Raised between two passes of a step that has changed nothing yet, as its learner stops."""


@dataclass(eq=False)
class StepProgress:
    """Passes of the present step, in tokens; those with gradient count BACKWARD times.

    `began`: time at which the computations of `step` began, None between two steps. `counted_s`:
    their seconds when a micro-batch was done last. `micro_batches`, `tokens`: forward passes so far
    and the tokens in them. `updated`: True from the first update of the step on: then it must be
    finished. `stops`: returns True if the learner is to stop.
    """

    step: int = 0
    began: float | None = None
    done: int = 0
    planned: int = 0
    counted_s: float = 0.0
    micro_batches: int = 0
    tokens: int = 0
    updated: bool = False
    stops: Callable[[], bool] = lambda: False

    def begin(self, step: int) -> None:
        """Start to count for a step."""
        self.done = self.planned = self.micro_batches = self.tokens = 0
        self.updated, self.counted_s = False, 0.0
        self.step, self.began = step, time.monotonic()

    def end(self) -> None:
        """Note that the step is computed."""
        self.began = None

    def plan(self, tokens: int, *, gradient: bool) -> None:
        """Add a pass over so many tokens to what the step has to do."""
        self.planned += tokens * (BACKWARD if gradient else 1)

    def count(self, tokens: int, *, gradient: bool) -> None:
        """Count a micro-batch of so many tokens as done."""
        self.micro_batches += 1
        self.tokens += tokens
        self.done += tokens * (BACKWARD if gradient else 1)
        self.counted_s = self.seconds

    def abandons(self) -> bool:
        """Return True if the rest of the step is to be left: a resume repeats it from its start."""
        return self.began is not None and not self.updated and self.stops()

    @property
    def share(self) -> float:
        """The part of the planned passes that is done, at most 1."""
        return min(1.0, self.done / self.planned) if self.planned else 0.0

    @property
    def seconds(self) -> float:
        """Seconds of computation of the step so far, 0 between two steps."""
        return 0.0 if self.began is None else time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Seconds to go by the pace of the passes that are done; 0 without one.

        A micro-batch under way counts for nothing yet, and neither do its seconds.
        """
        if self.began is None or not self.share:
            return 0.0
        return max(0.0, self.counted_s / self.share - self.seconds)
