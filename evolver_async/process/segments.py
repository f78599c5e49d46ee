"""Segments of shared memory that vLLM's processes map: a kill leaves them, and some ends do, too.

Their names are written into the private directory of the process that has started vLLM, and a sweep
of that directory removes them.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

FILE = "segments"
SHARED = Path("/dev/shm")
NAME = re.compile(rf"{SHARED}/((?:psm|vllm)_[^/\s]+)$", re.MULTILINE)
TITLE = "VLLM::"  # how vLLM's processes call themselves


def mapped(pid: int) -> set[str]:
    """Return the names of the segments of vLLM that a process maps; none if it has ended."""
    try:
        return set(NAME.findall(Path(f"/proc/{pid}/maps").read_text()))
    except OSError:  # or another system than Linux
        return set()


def mapped_below(pid: int) -> set[str]:
    """Return those of the processes of vLLM below this one."""
    names = set[str]()
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                if TITLE in " ".join(child.cmdline()):
                    names |= mapped(child.pid)
    return names


def remove(names: Iterable[str]) -> None:
    """Remove segments; other processes keep what they have mapped."""
    for name in names:
        if NAME.fullmatch(f"{SHARED}/{name}"):
            with suppress(OSError):
                os.unlink(SHARED / name)


def note(directory: Path, names: Iterable[str]) -> None:
    """Write the names of segments into a private directory; a full disk costs them."""
    with suppress(OSError):
        (directory / FILE).write_text("\n".join(sorted(names)))


def remove_noted(directory: Path) -> None:
    """Remove the segments whose names a private directory holds."""
    with suppress(OSError, UnicodeDecodeError):
        remove((directory / FILE).read_text().splitlines())
