"""Writer of metrics: JSONL always, Weights & Biases if wanted; timers of phases.

Numbers and numpy values only, no tensors. The JSONL file is the source of truth.
"""

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from evolver_async.durations import utc
from evolver_async.metrics.activity import LEARNER_LEVELS, ActivityClock, shares
from evolver_async.metrics.alerts import Level, alert
from evolver_async.metrics.histograms import HISTOGRAMS, Histogram
from evolver_async.metrics.sinks import Sinks
from evolver_async.metrics.tail import row_of
from evolver_async.metrics.wandb_process import UploadSupervisor
from evolver_async.room import lacks_room

UNWRITTEN_BYTES = 64 << 20  # of rows that wait for room on the disk

log = logging.getLogger(__name__)


class JsonlWriter:
    """Writer of one JSON object per line, at once; opening cuts off a line torn by a kill.

    On a full disk rows are kept, and written with the first one for which there is room.
    `count` is the number of rows in the file, without the lines that cannot be read: W&B gets no
    row for these, so that they must not count as missing there.
    """

    def __init__(self, path: Path) -> None:
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self._unwritten = b""
        end = self.count = 0
        with open(path, "rb") as written:
            for line in written:  # of months, in the memory of one line
                if line.endswith(b"\n"):
                    end += len(line)
                    self.count += row_of(line) is not None
        # The next row would continue a torn line, and be lost with it.
        self.file.truncate(end)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row of numbers and strings.

        JSON has no NaN: non-finite numbers become null and are named under `non_finite`.
        """
        plain = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in row.items()
        }
        bad = [name for name, x in plain.items() if isinstance(x, float) and not math.isfinite(x)]
        plain |= dict.fromkeys(bad)
        if bad:
            plain["non_finite"] = bad
        self._unwritten += json.dumps(plain, allow_nan=False).encode() + b"\n"
        self.count += 1
        self._write_rest()

    def _write_rest(self) -> None:
        lacked = len(self._unwritten) > UNWRITTEN_BYTES
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self.file.write(self._unwritten) :]
        except OSError as error:
            if not lacks_room(error):
                raise
            if lacked:  # the row that has begun stays whole
                end = self._unwritten.find(b"\n") + 1
                self._unwritten = self._unwritten[:end]
            what = "some rows are lost" if lacked else "its rows wait in memory"
            log.warning("%s: %s: %s", self.file.name, error.strerror, what)

    def close(self) -> None:
        self._write_rest()
        self.file.close()


class Metrics:
    """Log of a run's metrics, <directory>/metrics.jsonl; W&B follows it unless disabled.

    `lineage` and `progress`, set by the learner, are part of every row. With the step the lineage
    identifies the row; `progress` holds further axes of its curves.
    """

    def __init__(
        self, directory: Path, *, wandb: str = "disabled", sinks: Sequence[str] = ()
    ) -> None:
        self.directory = directory
        self.lineage = 0
        self.progress: dict[str, float] = {}
        self.rows = JsonlWriter(directory / "metrics.jsonl")
        self.histograms = JsonlWriter(directory / HISTOGRAMS)
        self.sinks = Sinks(sinks, directory)
        self.upload = UploadSupervisor(directory, wandb) if wandb != "disabled" else None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one row; `step` counts takes, the version is another column."""
        upload = {} if self.upload is None else self.upload.supervise(self.rows.count)
        row = {**self._head(step), **self.progress, **values, **upload}
        self.rows.write(row)
        self.sinks.send(row)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write the histograms of a step, before its row: W&B gets both together."""
        rows = {name: one.row() for name, one in histograms.items()}
        self.histograms.write({**self._head(step), "histograms": rows})

    def _head(self, step: int) -> dict[str, Any]:
        return {"time": utc(), "step": step, "lineage": self.lineage}

    def alert(self, title: str, text: str, level: Level = "WARN", console: bool = False) -> None:
        """Write an alert, of which W&B notifies people if it is enabled."""
        alert(self.directory, title, text, level, console)

    def close(self) -> None:
        self.rows.close()
        self.histograms.close()
        if self.upload is not None:
            self.upload.close(self.rows.count)


class Timers:
    """Wall-clock seconds by phase: `with timers("train"): …` adds to `time/train_s`.

    Phases nest, so these seconds overlap; those of `clock` do not.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.clock = ActivityClock(LEARNER_LEVELS)
        self.clock.begin()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self.clock.during(phase):
                yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def drain(self) -> dict[str, float]:
        """Return the seconds since the last call as metrics, and start from 0."""
        seconds, self.seconds = self.seconds, {}
        return {f"time/{phase}_s": value for phase, value in seconds.items()}

    def shares(self) -> dict[str, float]:
        """Return the learner's seconds since the last call, and the shares of its activities."""
        return shares("learner", self.clock.drain())
