"""Heartbeat of a process: a thread with a connection of its own reports progress and activity.

The work of a process may hold its loop for minutes, in a step or in a forward pass; the buffer
distinguishes it from a process that is stuck by its beats. A beat changes nothing but reports.
"""

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil

from evolver_async.wire.client import Rejected
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.messages import Beat

BEAT_S = 2.0  # between two beats
BUSY_SHARE = 0.05  # of one processor
SHARE_S = 15.0  # between two looks at the descendants for the share of the processors
BUSY_BYTES_PER_S = 1 << 20  # read or written: a model that is loaded from a slow disk


class Heartbeat(threading.Thread):
    """Thread that sends what `read` returns until the process ends, or `stop`.

    `read` is called in this thread; `busy`, `cpu_share` and `incarnation` are filled in here.
    `warn_s`: of the buffer, which gets several beats within this time.
    """

    def __init__(
        self,
        address: str,
        run_id: str,
        name: str,
        incarnation: int,
        keys: Path | None,
        *,
        read: Callable[[], Beat],
        warn_s: float = math.inf,
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._identity = address, run_id, name, incarnation
        self._keys = keys
        self._period_s = min(BEAT_S, warn_s / 4)
        self._read = read
        self._stop_asked = threading.Event()

    def run(self) -> None:
        with closing(DealerClient(*self._identity, keys=self._keys)) as client:
            asyncio.run(self._beat(client))

    def stop(self) -> None:
        """End the thread."""
        self._stop_asked.set()
        self.join(self._period_s)

    async def _beat(self, client: DealerClient) -> None:
        usage = Usage()
        while not self._stop_asked.is_set():
            beat = self._read()
            beat.incarnation, beat.busy = self._identity[3], usage.busy()
            beat.cpu_share = usage.share()
            with suppress(TimeoutError, Rejected):  # the process itself reports these
                await client.request(beat, timeout_s=self._period_s)
            await asyncio.sleep(self._period_s)


class Usage:
    """Use of processor and disk by this process since the last call."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._at = time.monotonic()
        self._own = self._read()
        self._descendants_s: float | None = None  # None: not measured at the last call
        self._shared_at, self._total_s, self._share = self._at, self._total(), 0.0

    def busy(self) -> bool:
        """True if this process has computed or moved data; its descendants count if it has not."""
        now, own = time.monotonic(), self._read()
        passed_s = max(1e-3, now - self._at)
        computed_s, moved = own[0] - self._own[0], own[1] - self._own[1]
        self._at, self._own = now, own
        if computed_s >= BUSY_SHARE * passed_s or moved >= BUSY_BYTES_PER_S * passed_s:
            self._descendants_s = None
            return True
        # Only where it is idle itself: a look at the descendants reads the files of each.
        before, self._descendants_s = self._descendants_s, self._of_descendants()
        return before is None or self._descendants_s - before >= BUSY_SHARE * passed_s

    def share(self) -> float:
        """Return the share of the host's processors that the tree used in the last SHARE_S."""
        now = time.monotonic()
        if now - self._shared_at >= SHARE_S:
            before, self._total_s = self._total_s, self._total()
            whole_s = (now - self._shared_at) * (os.cpu_count() or 1)
            self._share = min(1.0, max(0.0, self._total_s - before) / whole_s)
            self._shared_at = now
        return self._share

    def _total(self) -> float:
        """Return the processor seconds of the tree; those of a child stay when it has ended."""
        ended = os.times()
        gone_s = ended.children_user + ended.children_system
        return time.process_time() + gone_s + self._of_descendants()

    def _read(self) -> tuple[float, int]:
        """Return the processor seconds of this process, and the bytes that it read and wrote."""
        moved = 0
        if hasattr(self._process, "io_counters"):  # not on macOS
            with suppress(psutil.Error, OSError):
                io = self._process.io_counters()
                moved = io.read_bytes + io.write_bytes
        return time.process_time(), moved

    def _of_descendants(self) -> float:
        total = 0.0
        for child in self._process.children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                times = child.cpu_times()
                total += times.user + times.system
        return total
