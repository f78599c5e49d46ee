"""Sinks of metrics: functions of a user's own that get every row of metrics.jsonl."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evolver_async.extension import RAISED, implementation

Sink = Callable[[Mapping[str, Any], Path], None]  # a row, and the run's directory

log = logging.getLogger(__name__)


def nothing(row: Mapping[str, Any], run_dir: Path) -> None:
    """Discard a row: the signature that a sink has."""


def sink_of(name: str) -> Sink:
    """Return the function of one of `metrics.sinks`. Raises ValueError for an unfit one."""
    return implementation("metrics.sinks", name, {"nothing": nothing})


class Sinks:
    """Sinks of one process. One that raises is reported each time, and never ends the run."""

    def __init__(self, names: Sequence[str], run_dir: Path) -> None:
        self._sinks = {name: sink_of(name) for name in names}
        self._run_dir = run_dir

    def send(self, row: Mapping[str, Any]) -> None:
        """Give a row to every sink."""
        for name, sink in self._sinks.items():
            try:
                sink(row, self._run_dir)
            except RAISED as error:  # a user's code, which can raise anything
                log.error("metrics.sinks: %s failed: %s: %s", name, type(error).__name__, error)
