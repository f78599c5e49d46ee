"""What a publish over gloo costs beside a bare broadcast of the same bytes, in the same run.

    python tests/benchmarks/bench_weights.py --mib 256 --receivers 2 --rounds 7

Rounds of both take turns. A publish is everything from the call to the last receiver's confirmation
that it has verified and committed the version. The call is the part of it that always holds up the
learner; an update that follows at once also waits for the copy.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from datetime import timedelta
from multiprocessing.synchronize import Event
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from evolver_async.schema import WeightId
from evolver_async.weights.collective.channel import CollectivePublisher, CollectiveReceiver

MIB = 1 << 20
TIMEOUT = timedelta(seconds=120)


def bare_group(store: TCPStore, rank: int, size: int) -> Any:
    return ProcessGroupGloo(PrefixStore("bare/", store), rank, size, TIMEOUT)


def bare(group: Any, bytes_N: Tensor) -> float:
    """Seconds of a broadcast and of everybody's word that it is there."""
    began = time.perf_counter()
    group.broadcast(bytes_N, root=0).wait()
    group.allreduce([torch.zeros(1)]).wait()
    return time.perf_counter() - began


def receive(address: str, port: int, rank: int, size: int, mib: int, over: Event) -> None:
    """A receiver; bare rounds go on until the sender says that there is none left."""
    torch.set_num_threads(1)
    receiver = CollectiveReceiver(address, name=f"receiver-{rank}")
    store = TCPStore("127.0.0.1", port, is_master=False)
    group = bare_group(store, rank, size)
    bytes_N = torch.zeros(mib * MIB, dtype=torch.uint8)
    round_number = 0
    joined = False
    while not over.is_set():
        if not joined and receiver.head() is not None:
            store.set(f"joined/{rank}", "")
            joined = True
        if store.check([f"round/{round_number}"]):
            bare(group, bytes_N)
            round_number += 1
        time.sleep(0.001)
    receiver.close()


def measure(
    address: str, mib: int, receivers: int, rounds: int, bucket_mib: int
) -> dict[str, float]:
    """Medians and bests over the rounds after the first, which also touches the memory."""
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    publisher = CollectivePublisher(address, bucket_bytes=bucket_mib * MIB)
    places = range(1, receivers + 1)
    processes = [
        context.Process(target=receive, args=(address, store.port, rank, receivers + 1, mib, over))
        for rank in places
    ]
    for process in processes:
        process.start()
    group = bare_group(store, 0, receivers + 1)
    weights = {"all": torch.zeros(mib * MIB // 4)}
    bytes_N = weights["all"].view(torch.uint8)
    seconds: dict[str, list[float]] = {"bare": [], "publish": [], "call": [], "copied": []}
    for number in range(rounds + 1):
        weights["all"] += 1.0
        store.set(f"round/{number}", "")
        seconds["bare"].append(bare(group, bytes_N))
        began = time.perf_counter()
        publisher.publish(WeightId(lineage=1, step=number), weights)
        seconds["call"].append(time.perf_counter() - began)
        publisher.copied()
        seconds["copied"].append(time.perf_counter() - began)
        publisher.wait()
        seconds["publish"].append(time.perf_counter() - began)
        if number == 0:  # a publish that nobody takes part in costs nothing
            store.wait([f"joined/{rank}" for rank in places])
    over.set()
    for process in processes:
        process.join()
    publisher.close()
    found = {}
    for name, values in seconds.items():
        found[f"{name}_median"] = statistics.median(values[1:])
        found[f"{name}_best"] = min(values[1:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mib", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"{args.mib} MiB to {args.receivers} receivers, GB/s (best)")
    for column in ("bare", "publish", "publish / bare", "call ms", "copied ms"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as address:
        found = measure(address, args.mib, args.receivers, args.rounds, args.bucket_mib)
    gigabytes = args.mib * MIB / 1e9
    table.add_row(
        *(
            f"{gigabytes / found[f'{way}_median']:.2f} ({gigabytes / found[f'{way}_best']:.2f})"
            for way in ("bare", "publish")
        ),
        f"{found['bare_median'] / found['publish_median']:.0%}"
        f" ({found['bare_best'] / found['publish_best']:.0%})",
        *(f"{found[f'{part}_median'] * 1e3:.0f}" for part in ("call", "copied")),
    )
    Console().print(table)


if __name__ == "__main__":
    main()
