"""Filter of repeated log records: some are written, the others only counted."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

FIRST = 20  # records of one source line that are written within WINDOW_S
WINDOW_S = 60.0


@dataclass
class _Window:
    began: float
    written: int = 0
    omitted: int = 0


class RepeatFilter(logging.Filter):
    """Filter that passes the first FIRST records of a source line in every WINDOW_S.

    The first record of the next window has the number of the omitted ones. Several handlers share
    one filter: it decides once about a record.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._windows: dict[tuple[str, int], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "passes"):
            record.passes = self._passes(record)
        return record.passes  # pyright: ignore[reportAttributeAccessIssue]

    def _passes(self, record: logging.LogRecord) -> bool:
        now, source = self._clock(), (record.pathname, record.lineno)
        window = self._windows.get(source)
        if window is None or now - window.began >= WINDOW_S:
            if window is not None and window.omitted:
                past_s = now - window.began
                _add(record, f"{window.omitted:,} more of these were omitted in {past_s:.0f} s")
            window = self._windows[source] = _Window(now)
        window.written += 1
        if window.written == FIRST:
            _add(record, f"further ones are only counted for {WINDOW_S:.0f} s")
        window.omitted += window.written > FIRST
        return window.written <= FIRST


def _add(record: logging.LogRecord, note: str) -> None:
    record.msg, record.args = f"{record.getMessage()} ({note})", ()
