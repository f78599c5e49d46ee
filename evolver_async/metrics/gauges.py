"""Gauges of processes and hosts in <run>/system.jsonl: memory and processor time.

Every process of the run's host appends a line of its own (`GaugeThread`). An actor sends its gauges
to the buffer instead, because it can be on another host. The upload joins the lines of a
period to one row, whose axis is `clock_s`.
"""

import logging
import math
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from evolver_async.durations import utc
from evolver_async.metrics.families import CLOCK
from evolver_async.metrics.tail import append_row

SYSTEM = "system.jsonl"
PERIOD_S = 15.0  # between two samples of a process
FIRST_S = 1.0  # until the first one
ACTORS_PER_S = 4  # actors whose gauges are recorded; all of 1,000 actors would be 8 GB in a week
PROCESS = ("rss_bytes", "children_bytes", "cpu_share")
HOST = ("host_cpu_share", "host_memory_share")
NAMES = frozenset((*PROCESS, *HOST))

log = logging.getLogger(__name__)


class ProcessGauges:
    """Gauges of this process and of its host since the previous sample.

    rss_bytes: resident memory; children_bytes: that of its descendants; cpu_share: processor
    seconds per second, above 1 with several threads. The shares of the host lie in 0 to 1.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call starts the interval
        psutil.cpu_percent()

    def sample(self) -> dict[str, float]:
        """Return the gauges by name."""
        children = 0
        for child in self._process.children(recursive=True):
            try:
                children += child.memory_info().rss
            except psutil.Error:  # it has just ended
                continue
        return {
            "rss_bytes": float(self._process.memory_info().rss),
            "children_bytes": float(children),
            "cpu_share": round(self._process.cpu_percent() / 100, 4),
            "host_cpu_share": round(psutil.cpu_percent() / 100, 4),
            "host_memory_share": round(psutil.virtual_memory().percent / 100, 4),
        }


def append(run_dir: Path, name: str, host: str, gauges: Mapping[str, float]) -> None:
    """Append the gauges of a process, without those of unknown names and those not finite.

    On a full disk they are left out, with a warning in the log.
    """
    values = {k: v for k, v in gauges.items() if k in NAMES and math.isfinite(v)}
    line = {"time": round(time.time(), 2), "process": name, "host": host, **values}
    try:
        append_row(run_dir / SYSTEM, line)
    except OSError as error:
        log.warning("%s: %s", SYSTEM, error.strerror)


class GaugeThread(threading.Thread):
    """Thread that appends the gauges of this process until the process ends."""

    def __init__(self, run_dir: Path, name: str) -> None:
        super().__init__(name="gauges", daemon=True)
        self._run_dir = run_dir
        self._process_name = name
        self._stop_asked = threading.Event()

    def run(self) -> None:
        gauges, host, pause_s = ProcessGauges(), socket.gethostname(), FIRST_S
        while not self._stop_asked.wait(pause_s):
            append(self._run_dir, self._process_name, host, gauges.sample())
            pause_s = PERIOD_S

    def stop(self) -> None:
        """End the thread."""
        self._stop_asked.set()


class GaugeRows:
    """Rows of gauges for W&B out of the lines of system.jsonl: one for every PERIOD_S."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._slot = 0
        self._row: dict[str, Any] = {}

    def take_in(self, lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Add lines; return the rows that they complete."""
        rows = []
        for line in lines:
            began = self._began = line["time"] if self._began is None else self._began
            clock_s = max(0.0, line["time"] - began)
            if (slot := int(clock_s / PERIOD_S)) > self._slot:
                rows += self.rest()
                self._slot = slot
            self._row |= {CLOCK: round(clock_s, 2), "time": utc(line["time"])}
            for name in PROCESS:
                if name in line:
                    self._row[f"process/{line['process']}/{name}"] = line[name]
            for name in HOST:
                if name in line:
                    short = name.removeprefix("host_")
                    self._row[f"host/{line['host']}/{short}"] = line[name]
        return rows

    def rest(self) -> list[dict[str, Any]]:
        """Return the row that is not complete yet, if there is one."""
        row, self._row = self._row, {}
        return [row] if row else []
