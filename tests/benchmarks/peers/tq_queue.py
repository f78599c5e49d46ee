"""TransferQueue: three producers and one consumer, each a Ray actor, and two storage units.

    python tq_queue.py SECONDS

A producer puts groups of eight samples, which TransferQueue's documents recommend over single ones.
A put counts when it has returned. The consumer asks for batches of 64, reads and clears them.
"""

import asyncio
import threading
import time
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from window import IN_FLIGHT, PRODUCERS, WARMUP_S, processor_s, report, sample, window_s

GROUP, BATCH = 8, 64
PARTITION, TASK = "train", "learner"


def group() -> Any:
    """Return the samples of one group."""
    arrays = {name: torch.from_numpy(array).expand(GROUP, -1) for name, array in sample().items()}
    return TensorDict(arrays, batch_size=GROUP)


@ray.remote(num_cpus=1, max_concurrency=4)
class Producer:
    """Puts groups, so many at a time that `IN_FLIGHT` samples are under way."""

    def __init__(self) -> None:
        tq.init()
        self._client = tq.get_client()
        self.put = 0

    async def run(self) -> None:
        async def again() -> None:
            while True:
                await self._client.async_put(group(), partition_id=PARTITION)
                self.put += GROUP

        await asyncio.gather(*(again() for _ in range(IN_FLIGHT // GROUP)))

    async def count(self) -> int:
        return self.put


@ray.remote(num_cpus=1, max_concurrency=4)
class Consumer:
    """Takes batches and clears them."""

    def __init__(self) -> None:
        tq.init()
        self._client = tq.get_client()
        self.got = 0
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        fields = list(sample())
        while True:
            try:
                meta = self._client.get_meta(
                    data_fields=fields, batch_size=BATCH, partition_id=PARTITION, task_name=TASK
                )
            except Exception:  # the partition does not exist before the first put
                time.sleep(0.1)
                continue
            if not meta.size:
                time.sleep(0.001)
                continue
            self._client.get_data(meta)
            self._client.clear_samples(meta)
            self.got += meta.size

    async def count(self) -> int:
        return self.got


def main() -> None:
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    producers = [Producer.remote() for _ in range(PRODUCERS)]
    consumer = Consumer.remote()
    ray.get([one.count.remote() for one in (consumer, *producers)])
    for producer in producers:
        producer.run.remote()

    def counts() -> tuple[int, int]:
        put = sum(ray.get([producer.count.remote() for producer in producers]))
        return put, ray.get(consumer.count.remote())

    time.sleep(WARMUP_S)
    before, used, start = counts(), processor_s(), time.perf_counter()
    time.sleep(window_s())
    after, seconds = counts(), time.perf_counter() - start
    put, got = (late - early for late, early in zip(after, before, strict=True))
    report(put=put, got=got, dropped=0, seconds=seconds, used_s=processor_s() - used)
    ray.shutdown()


if __name__ == "__main__":
    main()
