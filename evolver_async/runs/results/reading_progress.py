"""Progress of a reading that takes long: how far it is, in a line every few seconds."""

import time
from collections.abc import Callable
from typing import TypeAlias

PAUSE_S = 5.0  # before the first line and between two

ProgressReceiver: TypeAlias = Callable[[str, float, float], object]  # what, done, of how much


def unheard(_what: str, _done: float, _whole: float) -> None:
    """Ignore progress."""


class ProgressLines:
    """Progress as lines. `tell` receives each; a reading of a few seconds has none."""

    def __init__(
        self, tell: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._reported_at = clock()

    def __call__(self, what: str, done: float, whole: float) -> None:
        if (now := self._clock()) - self._reported_at >= PAUSE_S:
            self._reported_at = now
            self._tell(f"{what}: {done:,.0f} of {whole:,.0f}")
