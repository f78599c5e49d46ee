"""verl's MessageQueue: three producers and one consumer, each a Ray actor, and the queue's actor.

    python verl_queue.py SECONDS

As in verl's rollouter a sample travels as cloudpickle's bytes. A put counts when it has returned.
"""

import asyncio
import time
from typing import Any

import ray
from verl.experimental.fully_async_policy.message_queue import (
    MessageQueue,
    MessageQueueClient,
)
from window import FULL, IN_FLIGHT, PRODUCERS, WARMUP_S, processor_s, report, sample, window_s

TAKING = 8  # the queue's actor runs 20 calls: that many takes of an empty queue would let no put in


@ray.remote(num_cpus=1, max_concurrency=4)
class Producer:
    """Puts samples, `IN_FLIGHT` at a time."""

    def __init__(self, queue: Any) -> None:
        self._client = MessageQueueClient(queue)
        self.put = 0

    async def run(self) -> None:
        async def again() -> None:
            while True:
                await self._client.put_sample(ray.cloudpickle.dumps(sample()))
                self.put += 1

        await asyncio.gather(*(again() for _ in range(IN_FLIGHT)))

    async def count(self) -> int:
        return self.put


@ray.remote(num_cpus=1, max_concurrency=4)
class Consumer:
    """Takes samples, `TAKING` at a time."""

    def __init__(self, queue: Any) -> None:
        self._client = MessageQueueClient(queue)
        self.got = 0

    async def run(self) -> None:
        async def again() -> None:
            while True:
                data, _ = await self._client.get_sample()
                ray.cloudpickle.loads(data)
                self.got += 1

        await asyncio.gather(*(again() for _ in range(TAKING)))

    async def count(self) -> int:
        return self.got


def main() -> None:
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    queue = MessageQueue.remote({}, FULL)
    producers = [Producer.remote(queue) for _ in range(PRODUCERS)]
    consumer = Consumer.remote(queue)
    for one in (consumer, *producers):
        one.run.remote()

    def counts() -> tuple[int, int, int]:
        put = sum(ray.get([producer.count.remote() for producer in producers]))
        dropped = ray.get(queue.get_statistics.remote())["dropped_samples"]
        return put, ray.get(consumer.count.remote()), dropped

    counts()  # all have started
    time.sleep(WARMUP_S)
    before, used, start = counts(), processor_s(), time.perf_counter()
    time.sleep(window_s())
    after, seconds = counts(), time.perf_counter() - start
    put, got, dropped = (late - early for late, early in zip(after, before, strict=True))
    report(put=put, got=got, dropped=dropped, seconds=seconds, used_s=processor_s() - used)
    ray.shutdown()


if __name__ == "__main__":
    main()
