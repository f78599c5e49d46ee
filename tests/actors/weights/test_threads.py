"""Work on weights waits for no call that an agent or an environment makes."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor, ones, zeros

from actors.engines.decoding.adoption import adopt
from actors.weights.source import FetchedWeights
from evolver_async.schema import WeightId

V1 = WeightId(lineage=1, step=1)


class Versions:
    """A receiver of one version."""

    def head(self) -> WeightId:
        return V1

    def available(self) -> list[WeightId]:
        return [V1]

    def fetch(self, weights: WeightId) -> dict[str, Tensor]:
        return {"w": ones(2)}

    def close(self) -> None: ...


class Holder:
    """An engine of one tensor, which has to be copied, as its type is another."""

    def __init__(self) -> None:
        self.w = zeros(2).double()

    async def update(self, weights: WeightId, tensors: dict[str, Tensor]) -> None:
        await adopt([(self.w, tensors["w"])], lambda: None)


def test_weights_arrive_while_blocking_calls_hold_all_threads_of_the_loop() -> None:
    released, engine = threading.Event(), Holder()

    async def play() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        calls = [asyncio.create_task(asyncio.to_thread(released.wait, 120)) for _ in range(3)]
        source = FetchedWeights(Versions(), engine)
        try:
            async with asyncio.timeout(60):
                await source.stage(V1)
                await source.adopt(V1)
        finally:
            released.set()
        await asyncio.gather(*calls)

    asyncio.run(play())
    assert engine.w.tolist() == [1.0, 1.0]
