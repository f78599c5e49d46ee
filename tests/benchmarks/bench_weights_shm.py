"""Cost of weights through shared memory beside a plain memcpy of the same bytes in the same run.

    python tests/benchmarks/bench_weights_shm.py --millions 100 300 --rounds 7

Rounds of all ways take turns. `publish` ends when the version can be fetched, `staged` when the
step goes on; `fetch` ends with verified tensors in another process, which adopts them as the torch
engine does while its event loop ticks every millisecond. The longest stop of that loop is given
beside the longest one without any adoption: that of the machine.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from actors.engines.decoding.adoption import adopt
from evolver_async.model.policy import pair_state
from evolver_async.schema import WeightId
from evolver_async.weights.shm import ShmPublisher, ShmReceiver

WIDTH = 1 << 10
TICK_S = 0.001
Seconds = tuple[float, float]  # on the clock, of the processor


def tensors_of(millions: int) -> dict[str, torch.Tensor]:
    """Matrices of 1, 4 and 16 million numbers, and norms, as models have them."""
    left, found = millions * 1_000_000, {}
    while left > 0:
        rows = (1 << 10, 4 << 10, 16 << 10)[len(found) % 3]
        found[f"matrix{len(found)}"] = torch.zeros(min(rows, -(-left // WIDTH)), WIDTH)
        found[f"norm{len(found)}"] = torch.zeros(WIDTH)
        left -= rows * WIDTH
    return found


class Holder(nn.Module):
    """A model that has such tensors and computes nothing."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(tensor)))


def timed(work: Callable[[], object]) -> Seconds:
    began, spent = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - spent


async def longest_stop(work: Callable[[], "asyncio.Future[None]"]) -> float:
    """Seconds by which the latest of the ticks during `work` was late."""
    task, longest = work(), 0.0
    while not task.done():
        began = time.perf_counter()
        await asyncio.sleep(TICK_S)
        longest = max(longest, time.perf_counter() - began - TICK_S)
    await task
    return longest


async def follow(address: str, millions: int, pipe: Connection) -> None:
    """Fetch and adopt each version that the learner names; tell what it took."""
    receiver, model = ShmReceiver(address), Holder(tensors_of(millions))
    fetched: list[Seconds] = []

    def fetch(weights: WeightId) -> dict[str, torch.Tensor]:
        found: list[dict[str, torch.Tensor]] = []
        fetched.append(timed(lambda: found.append(receiver.fetch(weights))))
        return found[0]

    async def take(weights: WeightId) -> None:
        tensors = await asyncio.to_thread(fetch, weights)
        await adopt(pair_state(model, tensors), lambda: None)

    while (step := await asyncio.to_thread(pipe.recv)) is not None:
        weights = WeightId(lineage=1, step=step)
        stop = await longest_stop(lambda weights=weights: asyncio.ensure_future(take(weights)))
        idle = await longest_stop(lambda: asyncio.ensure_future(asyncio.sleep(fetched[-1][0])))
        first = next(model.parameters())
        assert first.detach()[0, 0].item() == step
        pipe.send((fetched[-1], stop, idle))


def act(address: str, millions: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    asyncio.run(follow(address, millions, pipe))


def measure(millions: int, rounds: int, directory: str) -> dict[str, list[Seconds]]:
    """Seconds of each way by round, without the first rounds, which touch new memory."""
    tensors = tensors_of(millions)
    source_N = np.ones(sum(one.nbytes for one in tensors.values()), np.uint8)
    copied_N = np.ones_like(source_N)
    publisher = ShmPublisher(f"{directory}/w{millions}")
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    actor = context.Process(target=act, args=(publisher.address, millions, there))
    actor.start()
    found: dict[str, list[Seconds]] = {
        name: [] for name in ("memcpy", "staged", "publish", "fetch", "stop", "idle")
    }
    fresh = publisher.keep + 2  # versions until a file is filled again
    for step in range(fresh + rounds):
        for tensor in tensors.values():
            tensor.fill_(step)
        weights = WeightId(lineage=1, step=step)
        found["memcpy"].append(timed(lambda: np.copyto(copied_N, source_N)))
        began, spent = time.perf_counter(), time.process_time()
        found["staged"].append(timed(lambda weights=weights: publisher.publish(weights, tensors)))
        publisher.wait()
        found["publish"].append((time.perf_counter() - began, time.process_time() - spent))
        here.send(step)
        fetch, stop, idle = here.recv()
        found["fetch"].append(fetch)
        found["stop"].append((stop, 0.0))
        found["idle"].append((idle, 0.0))
    here.send(None)
    actor.join()
    publisher.close()
    return {name: values[fresh:] for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, nargs="+", default=[100, 300])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="median (best) over the rounds; 'of memcpy' compares rates")
    columns = ("millions", "way", "GB/s", "of memcpy", "processor s", "of memcpy's")
    for column in columns:
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-weights-") as directory:
        for millions in args.millions:
            size = sum(one.nbytes for one in tensors_of(millions).values()) / 1e9
            found = measure(millions, args.rounds, directory)
            clock = {name: [one for one, _ in values] for name, values in found.items()}
            spent = {
                name: statistics.median(one for _, one in values) for name, values in found.items()
            }
            middle = {name: statistics.median(values) for name, values in clock.items()}
            best = {name: min(values) for name, values in clock.items()}
            for name in ("memcpy", "staged", "publish", "fetch"):
                table.add_row(
                    str(millions),
                    name,
                    f"{size / middle[name]:.2f} ({size / best[name]:.2f})",
                    f"{middle['memcpy'] / middle[name]:.2f} ({best['memcpy'] / best[name]:.2f})",
                    f"{spent[name]:.3f}",
                    f"{spent[name] / spent['memcpy']:.2f}",
                )
            for name, what in (("stop", "adopting"), ("idle", "idle")):
                values = middle[name], best[name], max(clock[name])
                text = "{:.1f} ({:.1f}, {:.1f})".format(*(1e3 * one for one in values))
                table.add_row(str(millions), f"stop of the loop, {what}", f"{text} ms")
    Console(width=120).print(table)
    print("stops: median (best, worst)")


if __name__ == "__main__":
    main()
