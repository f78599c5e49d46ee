"""Checks of a command's arguments: every mistake of the user becomes a ConfigError."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from evolver_async.config import ConfigError


@contextlib.contextmanager
def as_config_errors() -> Iterator[None]:
    """Turn errors of the wings and the file system into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def run_directory(path: Path) -> Path:
    """Return the absolute path of a run directory. ConfigError for any other path."""
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path}: is not a run directory: it has no config.yaml")
    return path.resolve()
