"""Quarantine of damaged journal segments: a copy of the file and a note of the damage.

The segment itself is neither moved nor changed.
"""

import logging
import os
import shlex
import shutil
from pathlib import Path

from evolver_async.errors import Unrecoverable

NOTE = """{text}
{copy} is the file as it was found. The run does not start with this file as it is. Put an intact
copy in its place if there is one. Only if the machine lost its power in the very last commit of the
newest segment, that commit was never acknowledged, and it can be cut off:
    truncate -s {offset} {path}
"""

log = logging.getLogger(__name__)


class JournalError(Unrecoverable):
    """A journal that cannot be used; the message names file and offset."""


def lost(directory: Path, text: str) -> JournalError:
    """Return the error of a journal that lacks data, with the command that does without it."""
    run = shlex.quote(str(directory.parent))
    command = f"evolver-async train --resume {run} --fork NAME"
    return JournalError(f"{text}; a new run can go on from the newest checkpoint: {command}")


def damaged(path: Path, offset: int, cause: str) -> JournalError:
    """Copy the segment to quarantine/ with a note; return the error to raise."""
    text = f"{path} at {offset}: {cause}"
    copy = path.parent / "quarantine" / path.name
    try:
        copy.parent.mkdir(exist_ok=True)
        if not copy.exists():
            try:
                shutil.copyfile(path, copy)
            except OSError:
                copy.unlink(missing_ok=True)
                os.link(path, copy)  # needs no room
        with open(copy.with_suffix(".txt"), "a", encoding="utf-8") as note:
            note.write(NOTE.format(text=text, copy=copy, path=path, offset=offset))
    except OSError as error:
        log.error("%s: could not be quarantined: %s", path, error)
    return lost(path.parent, f"{text}; a copy and a note are in {copy.parent}")
