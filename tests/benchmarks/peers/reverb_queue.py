"""Reverb: a server with a queue table, three producers and one consumer, each a process.

    python reverb_queue.py SECONDS

A full table blocks its writers (`Table.queue`). An insert counts when it has returned. The consumer
samples through the client of the same host.
"""

import multiprocessing
import time
from multiprocessing.sharedctypes import Synchronized

import reverb
from window import FULL, PRODUCERS, WARMUP_S, processor_s, report, sample, window_s

Context = multiprocessing.get_context("spawn")
TABLE = "queue"


def produce(port: int, count: "Synchronized[int]") -> None:
    client, arrays = reverb.Client(f"127.0.0.1:{port}"), sample()
    while True:
        client.insert(arrays, {TABLE: 1.0})
        count.value += 1


def consume(port: int, count: "Synchronized[int]") -> None:
    client = reverb.Client(f"127.0.0.1:{port}")
    while True:
        for _ in client.sample(TABLE, num_samples=64):
            count.value += 1


def main() -> None:
    server = reverb.Server([reverb.Table.queue(TABLE, FULL)])
    counts = [Context.Value("q", 0, lock=False) for _ in range(PRODUCERS + 1)]
    targets = [consume] + [produce] * PRODUCERS
    processes = [
        Context.Process(target=target, args=(server.port, count), daemon=True)
        for target, count in zip(targets, counts, strict=True)
    ]
    for process in processes:
        process.start()
    while not all(count.value for count in counts):
        time.sleep(0.1)
    time.sleep(WARMUP_S)
    before, used = [count.value for count in counts], processor_s()
    start = time.perf_counter()
    time.sleep(window_s())
    after, seconds = [count.value for count in counts], time.perf_counter() - start
    got, *put = (late - early for late, early in zip(after, before, strict=True))
    report(put=sum(put), got=got, dropped=0, seconds=seconds, used_s=processor_s() - used)
    for process in processes:
        process.kill()
    server.stop()


if __name__ == "__main__":
    main()
