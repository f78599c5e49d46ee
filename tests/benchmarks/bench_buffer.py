"""Cost, rate and latency of durable trajectories, beside bare ZeroMQ with fdatasync.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_buffer.py [--rounds 5]

Real server, service and clients, each in a process of its own, over an ipc socket; the journal is
on the disk where `runs/` is. Three producers keep 64 trajectories each under way, and a learner
takes every group. Beside it `bare_zmq` does the least that is durable, with as many producers and
the same bytes. Rounds of both alternate, so that what else the machine does reaches both. A
trajectory counts when its ACK, which follows the sync, is back; its cost is all processor time of
the buffer's process, leases and takes included. `open_loop` has the latency.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from bare_zmq import push_bare, serve_bare
from open_loop import GROUPS, STOCK, latencies
from producers import BYTES_PER_TOKEN, IN_FLIGHT, Context, Crowd, config

from evolver_async.buffer.service import BufferService
from evolver_async.config import Config
from evolver_async.process.garbage import collect_rarely
from evolver_async.wire.messages import Welcome
from evolver_async.wire.server import Server

PRODUCERS = 3
SIZES = {"8 KiB": (744, 90), "256 KiB": (23_831, 1000)}  # tokens, microseconds wanted
SECONDS, SETTLE_S, TIMEOUT_S = 3.0, 0.5, 600.0
WARM_BYTES = 4 << 20  # written before the first round
RATE, LATENCY_S, REQUIRED_P99_MS = 1000, 10.0, 30
ROOT = Path(__file__).parents[2]


@dataclass
class Window:
    """One round of one side: when, and the processor time of its server."""

    start: float
    end: float
    cpu_s: float

    def count(self, ends: np.ndarray) -> int:
        return int(((ends >= self.start) & (ends < self.end)).sum())


@dataclass
class Side:
    """One of the two: its server, the switch of its producers, its rounds."""

    server: BaseProcess
    active: Event
    directory: Path
    windows: list[Window] = field(default_factory=list)

    def warm_up(self) -> None:
        """Let it run until it has written something."""
        self.active.set()
        deadline = time.monotonic() + TIMEOUT_S
        while sum(path.stat().st_size for path in self.directory.glob("*.log")) < WARM_BYTES:
            assert time.monotonic() < deadline, f"{self.directory}: nothing is written"
            time.sleep(0.1)
        self.active.clear()

    def measure(self) -> None:
        self.active.set()
        time.sleep(SETTLE_S)
        process = psutil.Process(self.server.pid)
        start, before = time.perf_counter(), process.cpu_times()
        time.sleep(SECONDS)
        end, after = time.perf_counter(), process.cpu_times()
        self.active.clear()
        spent = after.user + after.system - before.user - before.system
        self.windows.append(Window(start, end, spent))
        time.sleep(SETTLE_S)


def serve(address: str, directory: Path, settings: Config, stop: Event) -> None:
    welcome = Welcome(run_id="bench", config={}, weights_address="")
    service = BufferService(settings, "bench", directory, welcome, None, time.monotonic())
    server = Server(service, address, "bench")
    collect_rarely()  # as the buffer's main does
    server.serve(stop.is_set)
    server.close()
    service.close()


def compare(name: str, tokens: int, wanted_us: float, rounds: int, folder: Path) -> None:
    """Alternate both sides and print cost and rate."""
    stop, results = Context.Event(), Context.Queue()
    ours, bare = folder / "ours", folder / "bare"
    bare.mkdir()
    addresses = {one: f"ipc://{folder}/{one.name}.socket" for one in (ours, bare)}
    args = (addresses[ours], ours, config(), stop)
    server = Context.Process(target=serve, args=args, daemon=True)
    bare_server = Context.Process(
        target=serve_bare, args=(addresses[bare], bare / "file.log", stop), daemon=True
    )
    crowd = Crowd(addresses[ours], "bench", PRODUCERS, tokens)
    sides = {
        "ours": Side(server, crowd.active, ours),
        "bare": Side(bare_server, Context.Event(), bare),
    }
    args = (addresses[bare], BYTES_PER_TOKEN * tokens, IN_FLIGHT, sides["bare"].active)
    pushers = [
        Context.Process(target=push_bare, args=(*args, stop, results), daemon=True)
        for _ in range(PRODUCERS)
    ]
    for one in (server, bare_server, *pushers):
        one.start()
    crowd.start()
    crowd.active.clear()
    for side in sides.values():
        side.warm_up()
    for _ in range(rounds):
        for side in sides.values():
            side.measure()
    delivered, _ = crowd.end()
    stop.set()
    ends = {
        "ours": np.concatenate([one.ends for one in delivered]),
        "bare": np.concatenate([results.get(timeout=TIMEOUT_S) for _ in pushers]),
    }
    for one in (server, bare_server, *pushers):
        one.join()
    report(name, wanted_us, sides, ends)


def report(
    name: str, wanted_us: float, sides: dict[str, Side], ends: dict[str, np.ndarray]
) -> None:
    costs, rates = {}, {}
    for one, side in sides.items():
        counts = np.array([window.count(ends[one]) for window in side.windows])
        costs[one] = 1e6 * np.array([window.cpu_s for window in side.windows]) / counts
        rates[one] = counts / np.array([window.end - window.start for window in side.windows])
    print(
        f"{name}: buffer {spread(costs['ours'])} us of processor a durable push "
        f"({wanted_us} wanted), bare {spread(costs['bare'])}, "
        f"ratio {spread(costs['ours'] / costs['bare'], 1)}; "
        f"{spread(rates['ours'])} trajectories/s, bare {spread(rates['bare'])}, "
        f"ratio {spread(rates['ours'] / rates['bare'], 2)}",
        flush=True,
    )


def spread(values: np.ndarray, digits: int = 0) -> str:
    """Median and range."""
    low, middle, high = np.min(values), np.median(values), np.max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def measure_latency(folder: Path) -> None:
    stop, socket = Context.Event(), folder / "open.socket"
    address = f"ipc://{socket}"
    settings = config(max_staleness=STOCK // GROUPS - 1)
    settings.rollout.group_size, settings.learner.groups_per_step = 1, GROUPS
    settings.advantage.kind = "reinforce"  # the others compare members of a group
    args = (address, folder / "open", settings, stop)
    server = Context.Process(target=serve, args=args, daemon=True)
    server.start()
    while not socket.exists():
        assert server.is_alive(), "the buffer did not start"
        time.sleep(0.05)
    tokens = SIZES["8 KiB"][0]
    seconds = latencies(address, tokens, PRODUCERS, RATE, LATENCY_S)
    stop.set()
    server.join()
    p50, p90, p99 = 1000 * np.quantile(seconds, (0.5, 0.9, 0.99))
    print(
        f"open loop, {len(seconds) / LATENCY_S:.0f}/s of 8 KiB: end of the episode to the learner "
        f"p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms ({REQUIRED_P99_MS} wanted)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    (ROOT / "runs").mkdir(exist_ok=True)
    busy = psutil.cpu_percent(interval=1.0)
    print(f"{multiprocessing.cpu_count()} cores, {busy:.0f} % busy with other programs")
    for name, (tokens, wanted_us) in SIZES.items():
        with tempfile.TemporaryDirectory(prefix="bench-buffer-", dir=ROOT / "runs") as directory:
            compare(name, tokens, wanted_us, rounds, Path(directory))
    with tempfile.TemporaryDirectory(prefix="bench-buffer-", dir=ROOT / "runs") as directory:
        measure_latency(Path(directory))


if __name__ == "__main__":
    main()
