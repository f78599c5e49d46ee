"""Checks of what a command is given: every mistake of the user becomes a ConfigError."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from evolver_async.config import ConfigError


@contextlib.contextmanager
def user_mistakes() -> Iterator[None]:
    """Turn what the wings and the file system refuse into a ConfigError."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def run_directory(path: Path) -> Path:
    """The absolute path of a run directory. ConfigError for any other path."""
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path}: is no run directory (it has no config.yaml)")
    return path.resolve()
