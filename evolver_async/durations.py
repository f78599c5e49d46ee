"""Seconds as people read them, and as files hold them."""

import time
from datetime import UTC, datetime


def utc(seconds: float | None = None) -> str:
    """Format seconds since 1970, or now, as ISO 8601 in UTC, to the millisecond:
    2026-05-04T12:30:00.250Z.

    Every row and every line of a log has this form: hosts of a run can have several zones.
    """
    seconds = time.time() if seconds is None else seconds
    at = datetime.fromtimestamp(seconds, UTC)
    # not by `strftime`, which imports: libraries log while Python is shutting down
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def since_1970(text: str) -> float:
    """Invert `utc`, to the millisecond. Raise ValueError for another text."""
    return datetime.fromisoformat(text).timestamp()


def clock(seconds: float) -> str:
    """Format a duration as h:mm:ss or m:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def duration(seconds: float) -> str:
    """Format a duration in its largest unit."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
