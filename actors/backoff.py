"""Pause after consecutive failures, so that an immediate failure is not retried endlessly."""

import asyncio

PAUSE_S = 1.0


class FailureBackoff:
    """Holds the capacity of failed tickets back once `threshold` tickets in a row have failed.

    `held`: members whose capacity is held back now.
    """

    def __init__(self, threshold: int) -> None:
        self.held = 0
        self._threshold = threshold
        self._failed = 0  # tickets in a row

    async def after(self, members: int, failed: bool) -> None:
        """Record the end of a ticket; pause for PAUSE_S if it is one failure too many."""
        self._failed = self._failed + 1 if failed else 0
        if self._failed < self._threshold:
            return
        self.held += members
        try:
            await asyncio.sleep(PAUSE_S)
        finally:
            self.held -= members
