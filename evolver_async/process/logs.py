"""Logs of bounded growth: what comes again and again is written a few times, then counted."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

FIRST = 20  # lines of one place in the code that are written within WINDOW_S
WINDOW_S = 60.0


@dataclass
class _Window:
    began: float
    written: int = 0
    left_out: int = 0


class Repeats(logging.Filter):
    """Passes the first FIRST records of a place in every WINDOW_S. The next window's first record
    says how many were left out. Several handlers share one: it decides once about a record."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._windows: dict[tuple[str, int], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "passes"):
            record.passes = self._passes(record)
        return record.passes  # pyright: ignore[reportAttributeAccessIssue]

    def _passes(self, record: logging.LogRecord) -> bool:
        now, place = self._clock(), (record.pathname, record.lineno)
        window = self._windows.get(place)
        if window is None or now - window.began >= WINDOW_S:
            if window is not None and window.left_out:
                past_s = now - window.began
                _add(record, f"{window.left_out:,} more of these were left out in {past_s:.0f} s")
            window = self._windows[place] = _Window(now)
        window.written += 1
        if window.written == FIRST:
            _add(record, f"from now on these are only counted for {WINDOW_S:.0f} s")
        window.left_out += window.written > FIRST
        return window.written <= FIRST


def _add(record: logging.LogRecord, note: str) -> None:
    record.msg, record.args = f"{record.getMessage()} ({note})", ()
