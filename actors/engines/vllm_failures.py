"""Reason why vLLM's processes do not start. Both ends.

vLLM logs it in the process that fails and tells its actor only that one did. So that process writes
it to a file beside the workers' states.
"""

import contextlib
import logging
from pathlib import Path

FILE = "failure"


class FailureFile(logging.Handler):
    """Handler that keeps the first exception logged by vLLM's processes: later ones follow of it.

    `directory`: that of the workers' states, new with every start.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = directory / FILE

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[1]
        if error:
            with contextlib.suppress(OSError), self._file.open("x") as file:
                file.write(" ".join(f"{type(error).__name__}: {error}".split()))


def first_failure(directory: Path) -> str:
    """Return the first exception that a start has logged, on one line; "" without."""
    with contextlib.suppress(FileNotFoundError):
        return (directory / FILE).read_text()
    return ""
