"""The launcher's patience with a process that was told to end."""

from pathlib import Path

from evolver_async.checkpoint import directory as checkpoint


class Patience:
    """Deadline of a process that was told to end, in seconds on the caller's clock.

    It is `drain_s` away. Progress of a checkpoint in `checkpoints` moves it to `drain_s` from then.
    """

    def __init__(self, drain_s: float, now: float, checkpoints: Path | None = None) -> None:
        self.drain_s = drain_s
        self.deadline = now + drain_s
        self.checkpoints = checkpoints
        self._progress = self._look()

    def exhausted(self, now: float) -> bool:
        """True if the deadline has passed without progress."""
        progress = self._look()
        if progress != self._progress:
            self._progress = progress
            self.deadline = now + self.drain_s
        return now > self.deadline

    def _look(self) -> tuple[int, int] | None:
        return None if self.checkpoints is None else checkpoint.progress(self.checkpoints)
