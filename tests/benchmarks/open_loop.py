"""Latency from the end of an episode until the learner holds it, at a rate that nothing slows down.

Episodes end at random moments (exponential pauses) that were drawn before, whether or not the
buffer keeps up; each waits from its moment. Groups have one member, so no member waits for its
group. The learner stand-in takes `GROUPS` groups at a time, reports them at once and asks again.
"""

import asyncio
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from producers import CREDIT, NEWEST, TURNS, Context, Sequences, member_of

from evolver_async.schema import Ticket
from evolver_async.wire.dealer import DealerClient
from evolver_async.wire.messages import (
    Done,
    Kept,
    Lease,
    Push,
    Resume,
    Sample,
    Tickets,
    Wait,
)

GROUPS = 16  # a take
STOCK = 4096  # groups that may be granted ahead
KEEP_EVERY = 100  # takes
TIMEOUT_S = 600.0


async def end_episodes(
    address: str,
    name: str,
    tokens: int,
    rate: float,
    begin: Event,
    stop: Event,
    ready: Callable[[str], None],
) -> dict[int, float]:
    """Push `rate` trajectories a second from `begin` to `stop`; the moment of each, by group."""
    client, rng = DealerClient(address, "bench", name), random.Random(name)
    sequences = Sequences(tokens)
    tickets: asyncio.Queue[Ticket] = asyncio.Queue(8 * CREDIT)
    moments: dict[int, float] = {}

    async def lease() -> None:
        while True:
            reply = await client.request(Lease(credit=CREDIT, weights=NEWEST))
            for ticket in reply.tickets if isinstance(reply, Tickets) else []:
                await tickets.put(ticket)

    async def push(ticket: Ticket) -> None:
        assert ticket.weights is not None
        made = member_of(ticket, 0, sequences.sampled_by(ticket.weights), TURNS, True)
        await client.request(Push(trajectory=made))

    leasing, pushing = asyncio.create_task(lease()), set[asyncio.Task[None]]()
    while tickets.empty():
        await asyncio.sleep(0.01)
    ready(name)
    while not begin.is_set():
        await asyncio.sleep(0.01)
    moment = time.perf_counter()
    while not stop.is_set():
        moment += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        ticket = await tickets.get()
        moments[ticket.group_id] = moment
        task = asyncio.create_task(push(ticket))
        pushing.add(task)
        task.add_done_callback(pushing.discard)
    await asyncio.gather(*pushing)
    leasing.cancel()
    await asyncio.gather(leasing, return_exceptions=True)
    client.close()
    return moments


async def take(address: str, stop: Event, ready: Callable[[str], None]) -> dict[int, float]:
    """Take until `stop`; the time at which each group was there."""
    client, held = DealerClient(address, "bench", "learner"), dict[int, float]()
    lineage, number = (await client.request(Resume(lineage=0, take=0, version=0))).lineage, 0
    ready("learner")
    while not stop.is_set():
        groups = await client.request(Sample(lineage=lineage, take=number, stage=0))
        now = time.perf_counter()
        if isinstance(groups, Wait):
            continue
        ids = [group.group_id for group in groups]
        held |= dict.fromkeys(ids, now)
        number += 1
        await client.request(
            Done(lineage=lineage, take=number - 1, version=0, trained=ids, filtered={})
        )
        if number % KEEP_EVERY == 0:
            await client.request(Kept(take=number))
    client.close()
    return held


def _run(
    kind: str, args: tuple[Any, ...], ready: multiprocessing.Queue, results: multiprocessing.Queue
) -> None:
    work = take if kind == "take" else end_episodes
    results.put((kind, asyncio.run(work(*args, ready.put))))  # pyright: ignore[reportCallIssue]


def latencies(address: str, tokens: int, producers: int, rate: float, seconds: float) -> np.ndarray:
    """Seconds from end to learner, of every episode that ended in so many seconds."""
    begin, stop, stop_taking = Context.Event(), Context.Event(), Context.Event()
    ready, results = Context.Queue(), Context.Queue()
    work: list[tuple[str, tuple[Any, ...]]] = [("take", (address, stop_taking))]
    for number in range(producers):
        args = (address, f"actor-{number}", tokens, rate / producers, begin, stop)
        work.append(("end", args))
    processes = [
        Context.Process(target=_run, args=(*one, ready, results), daemon=True) for one in work
    ]
    for one in processes:
        one.start()
    for _ in processes:
        ready.get(timeout=TIMEOUT_S)
    begin.set()
    time.sleep(seconds)
    stop.set()
    moments: dict[int, float] = {}
    for _ in range(producers):
        moments |= results.get(timeout=TIMEOUT_S)[1]
    time.sleep(1.0)  # all are acknowledged; the last whole take is on its way
    stop_taking.set()
    held = results.get(timeout=TIMEOUT_S)[1]
    for one in processes:
        one.join()
    left = moments.keys() - held.keys()
    assert len(left) < GROUPS, f"{len(left)} episodes never reached the learner"
    return np.array([held[group] - moments[group] for group in held])
