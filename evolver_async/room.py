"""Room on a disk: errors that mean a lack of it, and waits for it. Errors of the disk itself."""

import errno
import logging
import re
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# as libraries word it that raise no OSError: safetensors, SQLite
WORDS = re.compile(rf"os error ({'|'.join(map(str, NO_ROOM))})\b|disk is full|No space left")
FAILED = (errno.EIO, errno.ENXIO, errno.EREMOTEIO)  # of a device, or a server of files
RETRY_S = 1.0
REPEAT_S = 60.0  # between two reports of a wait for room

log = logging.getLogger(__name__)


def lacks_room(error: BaseException | None) -> bool:
    """Return True if an error, or one that led to it, says that a disk or a quota is full."""
    while error is not None:
        if getattr(error, "errno", None) in NO_ROOM or WORDS.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def fails_to_sync(error: BaseException | None) -> bool:
    """Return True if an error, or one that led to it, says that a disk itself has failed."""
    while error is not None:
        if getattr(error, "errno", None) in FAILED:
            return True
        error = error.__cause__ or error.__context__
    return False


def await_room(
    work: Callable[[], T],
    what: str,
    *,
    stops: Callable[[], bool] = lambda: False,
    tell: Callable[[str], object] = lambda _: None,
) -> T:
    """Call `work` until there is room for what it writes; return its result.

    The wait is logged. `tell` gets a text when it begins, and "" at its end. If `stops` returns
    True, the lack of room is raised.
    """
    began, due = time.monotonic(), 0.0
    while True:
        try:
            found = work()
        except Exception as error:
            if not lacks_room(error) or stops():
                raise
            if (now := time.monotonic()) >= due:
                text = f"{what} waits for disk space: {error}"
                log.warning("%s", text)
                if not due:
                    tell(text)
                due = now + REPEAT_S
            time.sleep(RETRY_S)
            continue
        if due:
            log.warning("%s goes on after %.0f s", what, time.monotonic() - began)
            tell("")
        return found
