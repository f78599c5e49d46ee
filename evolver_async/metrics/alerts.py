"""Alerts of a run, <run>/alerts.jsonl: short texts that W&B sends to people, and the console shows.

Any process of the run's host appends to the file. The upload of the run sends each alert once.
"""

import logging
from pathlib import Path
from typing import Literal

from evolver_async.durations import utc
from evolver_async.metrics.tail import Tail, append_row

ALERTS = "alerts.jsonl"
TITLE_CHARS = 63  # W&B refuses longer titles
TEXT_CHARS = 1000
FAILED = "run failed"  # title of the alert of a run that cannot go on
Level = Literal["INFO", "WARN", "ERROR"]

log = logging.getLogger(__name__)


def alert(
    directory: Path, title: str, text: str, level: Level = "WARN", console: bool = False
) -> None:
    """Append an alert by one write, so that those of several processes stay whole lines.

    `console`: the display of the run shows it, to which nothing else tells it. A full disk costs
    the alert, which is then in the log alone, and not the process.
    """
    row: dict[str, object] = {"time": utc(), "title": title[:TITLE_CHARS]}
    row |= {"text": text[:TEXT_CHARS], "level": level, "console": console}
    try:
        append_row(directory / ALERTS, row)
    except OSError as error:
        log.warning("%s: %s; not written: %s: %s", ALERTS, error.strerror, title, text)


def count(directory: Path) -> int:
    """Return the number of alerts so far."""
    return len(Tail(directory / ALERTS).rows())


def last_title(directory: Path) -> str:
    """Return the title of the newest alert, "" if there is none."""
    rows = Tail(directory / ALERTS).rows()
    return rows[-1]["title"] if rows else ""
