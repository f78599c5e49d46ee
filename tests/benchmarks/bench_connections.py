"""One buffer process with a thousand encrypted connections, mostly idle, and beside producers.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_connections.py [--connections 1000]

Every connection is a client as an actor has one: it renews its leases every 10 s, and every 20 s it
returns its tickets and asks for others. The time of a LEASE is that until its reply, which follows
the sync of the grant. First nothing else happens; then three producers push trajectories of 8 KiB.
"""

import argparse
import asyncio
import multiprocessing
import random
import socket
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import psutil

from evolver_async.buffer.service import BufferService
from evolver_async.process.garbage import collect_rarely
from evolver_async.schema import Ticket
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.keys import make
from evolver_async.wire.messages import Lease, Release, Renew, Tickets, Welcome
from evolver_async.wire.server import Server

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from producers import Context, Crowd, config  # noqa: E402 (its folder is no package)

PROCESSES = 4  # of clients; ZeroMQ allows 1,023 sockets in one context
RENEW_S, LEASE_S = 10.0, 20.0
WARMUP_S, SECONDS, TIMEOUT_S = 25.0, 30.0, 60.0
PRODUCERS, TOKENS = 3, 744  # 8 KiB
REQUIRED_P99_S, REQUIRED_CPU, REQUIRED_RATE = 0.05, 0.3, 4000


def serve(address: str, keys: Path, directory: Path, stop: Event) -> None:
    welcome = Welcome(run_id="bench", config={}, weights_address="")
    settings = config(max_staleness=255, lease_s=60.0)
    service = BufferService(settings, "bench", directory, welcome, None, time.monotonic())
    server = Server(service, address, "bench", keys=keys)
    collect_rarely()
    server.serve(stop.is_set)
    server.close()
    service.close()


async def idle(
    address: str, keys: Path, name: str, stop: Event, waits: list[tuple[float, float]]
) -> None:
    """One connection, until `stop`: it holds its tickets for LEASE_S, as long episodes do."""
    rng = random.Random(name)
    client = DealerClient(address, "bench", name, keys=keys)
    await asyncio.sleep(rng.uniform(0, LEASE_S))
    due, held, weights = time.monotonic(), list[Ticket](), None
    while not stop.is_set():
        if time.monotonic() >= due:
            due += LEASE_S
            for one in held:
                release = Release(group_id=one.group_id, members=one.members, reason="bench")
                await client.request(release)
            start = time.perf_counter()
            reply = await client.request(Lease(credit=8, weights=weights))
            held = reply.tickets if isinstance(reply, Tickets) else []
            if held:
                waits.append((start, time.perf_counter() - start))
                weights = held[-1].weights
        else:
            await client.request(Renew(progress={}))
        await asyncio.sleep(rng.uniform(0.5, 1.5) * RENEW_S)
    client.close()


def idle_process(
    address: str, keys: Path, first: int, count: int, stop: Event, out: multiprocessing.Queue
) -> None:
    async def run() -> list[tuple[float, float]]:
        waits: list[tuple[float, float]] = []
        names = [f"idle-{number}" for number in range(first, first + count)]
        tasks = [asyncio.create_task(idle(address, keys, name, stop, waits)) for name in names]
        while not stop.is_set():
            await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return waits

    out.put(asyncio.run(run()))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=1000)
    count = parser.parse_args().connections
    (ROOT / "runs").mkdir(exist_ok=True)
    stop, stop_serving, out = Context.Event(), Context.Event(), Context.Queue()
    with tempfile.TemporaryDirectory(prefix="bench-connections-", dir=ROOT / "runs") as directory:
        keys, address = Path(directory) / "keys", f"tcp://127.0.0.1:{free_port()}"
        make(keys, [])
        journal = Path(directory) / "journal"
        server = Context.Process(target=serve, args=(address, keys, journal, stop_serving))
        server.start()
        each = -(-count // PROCESSES)
        clients = [
            Context.Process(target=idle_process, args=(address, keys, i * each, each, stop, out))
            for i in range(PROCESSES)
        ]
        crowd = Crowd(address, "bench", PRODUCERS, TOKENS, keys)
        crowd.start("learner")  # announces a head, without which nothing is granted
        for one in clients:
            one.start()
        time.sleep(WARMUP_S)
        quiet = measured(server.pid)
        crowd.start(*crowd.names)
        time.sleep(5.0)
        busy = measured(server.pid)
        delivered, _ = crowd.end()
        stop.set()
        waits = np.array([wait for _ in clients for wait in out.get(timeout=TIMEOUT_S)])
        stop_serving.set()
        for one in (server, *clients):
            one.join()
    ends = np.concatenate([one.ends for one in delivered])
    report("idle", waits, quiet)
    report("busy", waits, busy)
    rate = ((ends >= busy[0]) & (ends < busy[1])).sum() / (busy[1] - busy[0])
    print(f"{rate:.0f} durable trajectories/s of 8 KiB meanwhile ({REQUIRED_RATE} wanted)")


def measured(pid: int | None) -> tuple[float, float, float]:
    """Start, end, and the share of a core that the buffer used in between."""
    process = psutil.Process(pid)
    start, before = time.perf_counter(), process.cpu_times()
    time.sleep(SECONDS)
    end, after = time.perf_counter(), process.cpu_times()
    spent = after.user + after.system - before.user - before.system
    return start, end, spent / (end - start)


def report(name: str, waits: np.ndarray, window: tuple[float, float, float]) -> None:
    start, end, cpu = window
    inside = waits[(waits[:, 0] >= start) & (waits[:, 0] < end), 1]
    p50, p99 = 1000 * np.quantile(inside, (0.5, 0.99))
    print(
        f"{name}: {len(inside)} LEASEs, p50 {p50:.1f} ms, p99 {p99:.1f} ms"
        f" ({1000 * REQUIRED_P99_S:.0f} wanted idle), buffer {cpu:.0%} of a core"
        f" ({REQUIRED_CPU:.0%} wanted idle)"
    )


if __name__ == "__main__":
    main()
