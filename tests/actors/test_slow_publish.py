"""Publishes that last for several steps: actors go on with the weights that they have."""

import asyncio
from pathlib import Path

import pytest
import torch
from buffer_world import World, config
from workers import Walker, worker_of

from evolver_async.config import EnvConfig
from evolver_async.launch.serial import VirtualLoop
from evolver_async.schema import WeightId
from evolver_async.weights.shm import ShmPublisher
from evolver_async.wire import messages
from evolver_async.wire.in_process import LocalClient, LocalServer

RUN_S, TRAIN_S, PUBLISH_S = 120.0, 2.0, 5.0  # virtual seconds


class SlowLearner:
    """Trains TRAIN_S a take and reports it at once; its weights are visible PUBLISH_S later."""

    def __init__(self, client: LocalClient, publisher: ShmPublisher) -> None:
        self.client, self.publisher = client, publisher
        self.version = 0
        self.lags: list[int] = []

    async def publish(self) -> None:
        visible = 0
        while True:
            if visible < self.version:
                visible = self.version
                await asyncio.sleep(PUBLISH_S)
                self.show(visible)
            await asyncio.sleep(0.1)

    def show(self, step: int) -> None:
        self.publisher.publish(WeightId(lineage=1, step=step), {"w": torch.zeros(1)})

    async def learn(self) -> None:
        await self.client.request(messages.Resume(lineage=0, take=0, version=0))
        self.show(0)
        take = 0
        while True:
            sample = messages.Sample(lineage=1, take=take, stage=0)
            while isinstance(groups := await self.client.request(sample), messages.Wait):
                pass
            oldest = [one.oldest.step for group in groups for one in group.trajectories]
            self.lags.append(self.version - min(oldest))
            await asyncio.sleep(TRAIN_S)
            self.version += 1
            trained = [group.group_id for group in groups]
            done = messages.Done(
                lineage=1, take=take, version=self.version, trained=trained, filtered={}
            )
            await self.client.request(done)
            take += 1


def trained(tmp_path: Path, staleness: int) -> tuple[list[int], float]:
    """Return the lag of every take, and the actor's share of time in waiting for weights."""
    loop = VirtualLoop()
    settings = config(max_staleness=staleness)
    settings.env = EnvConfig(name="rollouts:Corridor")
    publisher = ShmPublisher(tmp_path / "weights", background=False)
    world = World(tmp_path / "journal", settings)

    async def run() -> tuple[list[int], float]:
        server = LocalServer(world.service, "run")
        server.start()
        learner = SlowLearner(LocalClient(server, "learner"), publisher)
        client, engine = LocalClient(server, "actor-0"), Walker(pause_s=0.5)
        engine.weights = None
        worker = worker_of(client, engine, publisher, groups=2, group_size=2)
        worker.sizes, worker.size = [2], 2
        tasks = [asyncio.create_task(one()) for one in (learner.learn, learner.publish)]
        loop.call_later(RUN_S, worker.stop.set)
        loop.call_later(0.0, worker.clock.begin, loop.time)
        await worker.run()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()
        seconds = worker.clock.settle()
        return learner.lags, seconds["weights"] / sum(seconds.values())

    try:
        return loop.run_until_complete(run())
    finally:
        world.service.close()
        publisher.close()
        loop.close()


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_no_actor_waits_with_a_ticket_for_weights_that_are_being_written(
    tmp_path: Path, staleness: int
) -> None:
    lags, waiting = trained(tmp_path, staleness)
    assert len(lags) > 8 and max(lags) <= staleness
    assert waiting == 0
