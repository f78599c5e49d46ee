"""Durable trajectories per second through a buffer process, from three producer processes.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_buffer.py

Real server, service and clients, each in a process of its own, over an ipc socket; the journal is
on the disk where `runs/` is. A trajectory counts when its ACK, which follows the sync, is back.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from evolver_async.buffer.service import BufferService
from evolver_async.process.setup import collect_rarely
from evolver_async.protocol.messages import Welcome as WelcomeMessage
from evolver_async.transport.server import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from producers import BYTES_PER_TOKEN, Context, Crowd, config

PRODUCERS, TOKENS = 3, 744  # 8 KiB
WARMUP_S, SECONDS, TIMEOUT_S = 2.0, 10.0, 20.0
REQUIRED = 3000  # trajectories/s
MACHINE = "machine"
ROOT = Path(__file__).parents[2]


class CountingService(BufferService):
    """The service; `synced` counts its commits that had something to write."""

    synced = 0

    def commit(self) -> None:
        before = self.store.journal.size
        super().commit()
        self.synced += self.store.journal.size != before


def serve(address: str, directory: Path, stop: Event, results: multiprocessing.Queue) -> None:
    welcome = WelcomeMessage(run_id="bench", config={}, weights_address="")
    service = CountingService(config(), "bench", directory, welcome, None, time.monotonic())
    server = Server(service, address, "bench")
    collect_rarely()  # as the buffer's main does
    start = time.monotonic()
    server.serve(stop.is_set)
    results.put(service.synced / (time.monotonic() - start))
    server.close()
    service.close()


def main() -> None:
    (ROOT / "runs").mkdir(exist_ok=True)
    results = Context.Queue()
    stop_serving = Context.Event()
    with (
        tempfile.TemporaryDirectory() as sockets,
        tempfile.TemporaryDirectory(prefix="bench-buffer-", dir=ROOT / "runs") as directory,
    ):
        address = f"ipc://{sockets}/buffer"
        server = Context.Process(
            target=serve, args=(address, Path(directory), stop_serving, results), daemon=True
        )
        crowd = Crowd(address, "bench", PRODUCERS, TOKENS)
        server.start()
        crowd.start()
        children = {"buffer": server, **crowd.processes}
        time.sleep(WARMUP_S + 3.0)  # five interpreters start first
        start, before = time.perf_counter(), cpu_seconds(children)
        time.sleep(SECONDS)
        end, after = time.perf_counter(), cpu_seconds(children)
        delivered, _ = crowd.end()
        stop_serving.set()
        syncs = results.get(timeout=TIMEOUT_S)
        server.join()
    ends, waits = (
        np.concatenate([getattr(one, name) for one in delivered]) for name in ("ends", "waits")
    )
    latency = waits[(ends >= start) & (ends < end)]
    rate = len(latency) / (end - start)
    p50, p99 = 1000 * np.quantile(latency, (0.5, 0.99))
    print(
        f"{rate:.0f} durable trajectories/s (required {REQUIRED}), "
        f"{BYTES_PER_TOKEN * TOKENS * rate / 1e6:.1f} MB/s, {syncs:.0f} syncs/s; "
        f"ack latency p50 {p50:.1f} ms, p99 {p99:.1f} ms"
    )
    shares = {name: (after[name] - before[name]) / (end - start) for name in after}
    machine = shares.pop(MACHINE)
    ours = sum(shares.values())
    print(
        f"cores of {os.cpu_count()} in use: "
        + ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
        + f" (busiest: {max(shares, key=lambda name: shares[name])}), "
        + f"other programs {max(0.0, machine - ours):.2f}; {1e6 * ours / rate:.0f} us of CPU a "
        + f"trajectory, {1e6 * shares['buffer'] / rate:.0f} of them in the buffer"
    )


def cpu_seconds(children: Mapping[str, BaseProcess]) -> dict[str, float]:
    """CPU spent so far, by child and on the whole machine."""
    times: dict[str, Any] = {
        name: psutil.Process(process.pid).cpu_times() for name, process in children.items()
    }
    times[MACHINE] = psutil.cpu_times()
    return {name: spent.user + spent.system for name, spent in times.items()}


if __name__ == "__main__":
    main()
