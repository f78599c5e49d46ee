"""Files that a power cut or a full disk leaves whole, and names in files that others wrote."""

import json
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write a file that exists completely or, after a power cut too, as it was before."""
    part = path.with_name(f".{path.name}")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def is_inside(name: str) -> bool:
    """Return True if a name from a file, joined to a directory, is the path of a file below it."""
    path = PurePosixPath(name)
    plain = str(path) == name and "\0" not in name
    return plain and path.parts[:1] not in ((), ("/",)) and ".." not in path.parts


def parsed(text: str | bytes) -> Any:
    """Return the value of a text in JSON. Raise ValueError, also if it is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deep") from None


def make_own(directory: Path) -> None:
    """Make a directory whose old files are deleted in time. A link in its place is unlinked: what
    it leads to belongs to others."""
    if directory.is_symlink():
        directory.unlink()
    directory.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Remove a file, or a directory with its content. A link is unlinked and never followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
