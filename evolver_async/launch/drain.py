"""Deadline of a process that was told to end."""

from pathlib import Path

from evolver_async.checkpoint import directory as checkpoint


class DrainDeadline:
    """Deadline `drain_s` after `now`, in seconds on the caller's clock.

    Progress of a checkpoint in `checkpoints` moves it to `drain_s` after that progress.
    """

    def __init__(self, drain_s: float, now: float, checkpoints: Path | None = None) -> None:
        self.drain_s = drain_s
        self.deadline = now + drain_s
        self.checkpoints = checkpoints
        self._progress = self._read_progress()

    def passed(self, now: float) -> bool:
        """True if the deadline is over and there was no progress since the last call."""
        progress = self._read_progress()
        if progress != self._progress:
            self._progress = progress
            self.deadline = now + self.drain_s
        return now > self.deadline

    def _read_progress(self) -> tuple[int, int] | None:
        return None if self.checkpoints is None else checkpoint.progress(self.checkpoints)
