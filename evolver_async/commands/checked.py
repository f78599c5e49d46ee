"""Checks of a command's arguments: every mistake of the user becomes a ConfigError."""

import contextlib
import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from evolver_async.config import ConfigError
from evolver_async.study.directory import DEFINITION

PORT = re.compile(r":\d+$")  # the end of an address


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
    if not _is_run(path):
        raise ConfigError(f"{path}: is not a run directory: it has no config.yaml{_hint(path)}")
    return path.resolve()


def directory_of_runs(path: Path) -> Path:
    """Return a directory that may hold runs. ConfigError for any other path."""
    if not path.is_dir():
        raise ConfigError(f"{path}: is not a directory; name the one that holds the runs")
    if _is_run(path):
        raise ConfigError(f"{path}: is a run; name the directory that holds it: {path.parent}")
    return path


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def _hint(path: Path) -> str:
    """Name the run that a wrong path may mean: of a study, around it, or of a similar name."""
    if PORT.search(path.name) and not path.exists():
        return f", did you mean tcp://{path}?"
    if (path / DEFINITION).is_file():
        return f"; it is a study, whose runs are in {path / 'runs'}"
    if _is_run(path.parent):
        return f", did you mean {path.parent}?"
    places = path.parent, Path("runs")
    near = {run.parent.name: run.parent for place in places for run in place.glob("*/config.yaml")}
    close = difflib.get_close_matches(path.name, near, n=1)
    return f", did you mean {near[close[0]]}?" if close else ""
