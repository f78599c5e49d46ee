"""Capacity of the disk: limits on new groups and arrivals, and the need for a checkpoint.

The run never waits for space that a checkpoint could free. Grants stop early, while
two checkpoints and two segments fit, but only while the learner has a whole take to wait for or to
train; where it would starve, groups are still granted until only one checkpoint and one segment
fit. So the learner goes on, every DONE asks it for a checkpoint, and with KEPT old segments go.
What is granted beyond `limit_bytes` this way is a few takes at most. Where even one checkpoint and
one segment do not fit, arrivals are answered RETRY, and every process waits for space.
"""

import math
from dataclasses import dataclass
from itertools import chain

from evolver_async.buffer.log.journal import Journal
from evolver_async.buffer.state.groups import UNTRAINED
from evolver_async.buffer.state.replay import Replay


@dataclass
class DiskCapacity:
    """Reads the journal's numbers. `limit_bytes`: size of the journal at which grants stop."""

    replay: Replay
    journal: Journal
    limit_bytes: int

    def full(self) -> str | None:
        """Reason why no trajectory may be accepted, None if it may."""
        return self.journal.problem or self._lacks(self._reserve())

    def scarce(self) -> str | None:
        """Reason why the journal should not grow much further, None if it may."""
        size = self.journal.size
        if size >= self.limit_bytes:
            return (
                f"the journal holds {size} bytes of buffer.disk_limit_bytes={self.limit_bytes}; "
                "a checkpoint lets old segments go"
            )
        return self._lacks(2 * self._reserve())

    def obstacle(self) -> str | None:
        """Reason why no new group may be granted, None if one may."""
        scarce = self.scarce()
        return self.full() or (scarce if scarce and self._supplied() else None)

    def wants_checkpoint(self) -> bool:
        """True if a checkpoint would free segments and space is scarce."""
        if not (self.full() or self.scarce()):
            return False
        if self.journal.archive.limit_bytes == math.inf and self.journal.size < self.limit_bytes:
            return False  # they would only move
        used = [
            segment
            for held in self.replay.at.groups.values()
            if held.state != "closed"
            for segment in held.segments
        ]
        return min(self.journal.sizes) < min(used, default=self.journal.newest)

    def _reserve(self) -> int:
        """A checkpoint is written beside those that are kept; a segment begins with a snapshot."""
        return self.replay.at.checkpoint_bytes + self.journal.segment_bytes

    def _lacks(self, needed: int) -> str | None:
        free = self.journal.free
        if free >= needed:
            return None
        return (
            f"{self.journal.directory}: only {free} bytes of disk are free, {needed} are wanted "
            "for checkpoints and segments"
        )

    def _supplied(self) -> bool:
        """True if the learner has a take, or can get one, without any new group."""
        replay = self.replay
        if replay.by_state["taken"]:
            return True
        wanted = replay.numbers.groups_per_step
        for held in chain(replay.by_state["open"].values(), replay.by_state["ready"].values()):
            wanted -= held.kind not in UNTRAINED
            if wanted <= 0:
                return True
        return False
