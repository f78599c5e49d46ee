"""The first prompt of a run with its reply and reward, for people: <run>/first_reply.txt.

An actor writes the text, the buffer keeps the first one, and the display of the run shows it.
"""

import logging
from pathlib import Path

from evolver_async.files import write_whole

FILE = "first_reply.txt"

log = logging.getLogger(__name__)


def printable(text: str) -> str:
    """Return a text that cannot steer a terminal: control characters but line ends are spelled."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in text
    )


def keep(run_dir: Path, text: str) -> None:
    """Write the text unless the run has one; a full disk costs the text."""
    path = run_dir / FILE
    if text and not path.exists():
        try:
            write_whole(path, printable(text))
        except OSError as error:
            log.warning("%s: %s", FILE, error.strerror)


def read(run_dir: Path) -> str:
    """Return the text, "" before there is one."""
    try:
        return (run_dir / FILE).read_text()
    except FileNotFoundError:
        return ""
