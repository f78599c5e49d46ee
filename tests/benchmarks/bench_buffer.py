"""Durable trajectories per second through a buffer process, from three producer processes.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_buffer.py

Real server, service and clients, each in a process of its own, over an ipc socket; the journal is
on the disk where `runs/` is. A producer leases tickets and pushes their members, several in flight;
a trajectory counts when its ACK, which follows the sync, is back. A learner stand-in takes, unpacks
and reports every group, so admission never stops for long.
"""

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from evolver_async.buffer.service import Service
from evolver_async.config import Buffer, Config, Learner, Rollout, Stage
from evolver_async.launch.roles import collect_rarely
from evolver_async.messages import Ack, Done, Kept, Lease, Push, Resume, Sample, Tickets, Wait
from evolver_async.messages import Welcome as WelcomeMessage
from evolver_async.schema import Role, Sequence, Ticket, Trajectory, VersionRun, WeightId
from evolver_async.transport import DealerClient, Server

PRODUCERS, IN_FLIGHT, CREDIT = 3, 64, 8  # what an actor of 8 groups of 8 has under way
TOKENS, TURNS = 744, 10  # 11 bytes a token: 8 KiB
GROUPS_PER_STEP, GROUP_SIZE = 32, 8
CHECKPOINT_EVERY = 25  # takes
WARMUP_S, SECONDS, POLL_S, TIMEOUT_S = 2.0, 10.0, 0.1, 20.0
REQUIRED = 3000  # trajectories/s
MACHINE = "machine"
ROOT = Path(__file__).parents[2]

Context = multiprocessing.get_context("spawn")


class Sequences:
    """Sequences of one shape; a new one only where the weights are new."""

    def __init__(self) -> None:
        turn = np.full(TOKENS // TURNS, Role.OBSERVATION, np.uint8)
        turn[:8] = Role.ACTION
        roles = np.full(TOKENS, Role.PROMPT, np.uint8)
        roles[-TURNS * len(turn) :] = np.tile(turn, TURNS)
        turns = np.full(TOKENS, -1, np.int16)
        turns[-TURNS * len(turn) :] = np.repeat(np.arange(TURNS), len(turn))
        self.arrays = {
            "tokens": np.random.default_rng(0).integers(0, 512, TOKENS, np.int32),
            "roles": roles,
            "turns": turns,
            "logprobs": np.where(roles == Role.ACTION, -0.5, 0.0).astype(np.float32),
        }
        self.actions = int((roles == Role.ACTION).sum())
        self.made: dict[WeightId, Sequence] = {}

    def sampled_by(self, weights: WeightId) -> Sequence:
        if weights not in self.made:
            run = VersionRun(weights=weights, tokens=self.actions)
            self.made = {weights: Sequence(**self.arrays, versions=[run])}
        return self.made[weights]


def member_of(ticket: Ticket, member: int, sequences: Sequences) -> Trajectory:
    assert ticket.weights is not None
    return Trajectory(
        group_id=ticket.group_id,
        member=member,
        attempt=ticket.attempt,
        actor="producer",
        incarnation=0,
        sequences=[sequences.sampled_by(ticket.weights)],
        reward=float(member % 2),
        success=member % 2 == 1,
        terminated=True,
        truncated=False,
        turn_rewards=np.zeros(TURNS, np.float32),
        turn_flags=np.zeros(TURNS, np.uint8),
        labels=np.zeros(TURNS, np.int8),
        label_source="",
        experience_ids=[],
        policy="learned",
        timing={"engine": 0.1, "env": 0.1},
    )


class CountingService(Service):
    """The service; `synced` counts its commits that had something to write."""

    synced = 0

    def commit(self) -> None:
        before = self.book.journal.size
        super().commit()
        self.synced += self.book.journal.size != before


def serve(address: str, directory: Path, stop: Event, results: multiprocessing.Queue) -> None:
    config = Config(
        rollout=Rollout(group_size=GROUP_SIZE),
        learner=Learner(groups_per_step=GROUPS_PER_STEP),
        buffer=Buffer(max_staleness=4),
        stages=[Stage(kind="rl", steps=1)],
    )
    welcome = WelcomeMessage(run_id="bench", config={}, weights_address="")
    service = CountingService(config, "bench", directory, welcome, None, time.monotonic())
    server = Server(service, address, "bench")
    collect_rarely()  # as the buffer's main does
    start = time.monotonic()
    server.serve(stop.is_set)
    results.put(("syncs/s", service.synced / (time.monotonic() - start)))
    server.close()
    service.close()


def learn(address: str, stop: Event) -> None:
    """Take, report as trained under a new version, let the journal go now and then."""

    async def loop() -> None:
        client = DealerClient(address, "bench", "learner")
        lineage = (await client.request(Resume(lineage=0, take=0, version=0))).lineage
        take = 0
        while not stop.is_set():
            groups = await client.request(Sample(lineage=lineage, take=take, stage=0))
            if isinstance(groups, Wait):
                continue
            trained = [group.group_id for group in groups]
            await client.request(
                Done(lineage=lineage, take=take, version=take + 1, trained=trained, filtered={})
            )
            take += 1
            if take % CHECKPOINT_EVERY == 0:
                await client.request(Kept(take=take - CHECKPOINT_EVERY))
        client.close()

    asyncio.run(loop())


def produce(address: str, name: str, stop: Event, results: multiprocessing.Queue) -> None:
    """Reports the times of all ACKs and how long each was waited for."""
    acked: list[tuple[float, float]] = []
    sequences = Sequences()
    members: asyncio.Queue[tuple[Ticket, int]] = asyncio.Queue(2 * CREDIT * GROUP_SIZE)

    async def push(client: DealerClient) -> None:
        while True:
            ticket, member = await members.get()
            trajectory = member_of(ticket, member, sequences)
            start = time.perf_counter()
            reply = await client.request(Push(trajectory=trajectory))
            end = time.perf_counter()
            assert isinstance(reply, Ack), reply
            acked.append((end, end - start))

    async def lease(client: DealerClient) -> None:
        while True:
            reply = await client.request(Lease(credit=CREDIT))
            for ticket in reply.tickets if isinstance(reply, Tickets) else []:
                for member in ticket.members:
                    await members.put((ticket, member))

    async def loop() -> None:
        client = DealerClient(address, "bench", name)
        tasks = [asyncio.create_task(push(client)) for _ in range(IN_FLIGHT)]
        tasks.append(asyncio.create_task(lease(client)))
        while not stop.is_set():
            await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        for task in tasks:
            task.cancel()
        client.close()

    asyncio.run(loop())
    results.put((name, np.array(acked)))


def main() -> None:
    (ROOT / "runs").mkdir(exist_ok=True)
    results = Context.Queue()
    stop, stop_serving = Context.Event(), Context.Event()
    with (
        tempfile.TemporaryDirectory() as sockets,
        tempfile.TemporaryDirectory(prefix="bench-buffer-", dir=ROOT / "runs") as directory,
    ):
        address = f"ipc://{sockets}/buffer"
        server = Context.Process(
            target=serve, args=(address, Path(directory), stop_serving, results), daemon=True
        )
        names = [f"producer-{index}" for index in range(PRODUCERS)]
        clients = [
            Context.Process(target=learn, args=(address, stop), daemon=True),
            *(
                Context.Process(target=produce, args=(address, n, stop, results), daemon=True)
                for n in names
            ),
        ]
        children = dict(zip(("buffer", "learner", *names), (server, *clients), strict=True))
        for process in children.values():
            process.start()
        time.sleep(WARMUP_S + 3.0)  # five interpreters start first
        start, before = time.perf_counter(), cpu_seconds(children)
        time.sleep(SECONDS)
        end, after = time.perf_counter(), cpu_seconds(children)
        stop.set()
        found = dict(results.get(timeout=TIMEOUT_S) for _ in names)
        for client in clients:
            client.join()
        stop_serving.set()
        found |= [results.get(timeout=TIMEOUT_S)]
        server.join()
    acked = np.concatenate([found[name] for name in names])
    latency = acked[(acked[:, 0] >= start) & (acked[:, 0] < end), 1]
    rate = len(latency) / (end - start)
    p50, p99 = 1000 * np.quantile(latency, (0.5, 0.99))
    print(
        f"{rate:.0f} durable trajectories/s (required {REQUIRED}), {11 * TOKENS * rate / 1e6:.1f} "
        f"MB/s, {found['syncs/s']:.0f} syncs/s; ack latency p50 {p50:.1f} ms, p99 {p99:.1f} ms"
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
