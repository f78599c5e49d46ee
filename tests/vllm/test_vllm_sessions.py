"""Sessions that begin around an update with `keep_kv` find no KV of older weights, with a stand-in
for vLLM's processes; `test_vllm_engine` has them."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from engine_conformance import V0, V1, V2, request

from actors.engines.engine import Generation
from actors.engines.vllm_engine import VllmEngine
from actors.engines.vllm_usage import EngineUsage
from actors.weights.arrival import EngineLost
from evolver_async.schema import WeightId

pytestmark = pytest.mark.vllm


class StandIn:
    """A core and its AsyncLLM: requests wait in it for `serving`; an update waits for `swapping`.

    `salts`: of all requests, in order.
    """

    lora_request = None

    def __init__(self) -> None:
        self.weights, self.updates, self.served = V0, 0, False
        self.serving, self.swapping, self.paused = (asyncio.Event() for _ in range(3))
        self.salts: list[str] = []
        self.lost, self.restarts, self.paused_s, self.usage = 0, 0, 0.0, EngineUsage()

    async def ready(self) -> "StandIn":
        return self

    def lose(self, llm: "StandIn") -> None:
        self.lost += 1

    async def adopt(self, weights: WeightId) -> None:
        self.paused.set()
        await self.swapping.wait()
        self.weights, self.updates = weights, self.updates + 1

    async def generate(self, prompt: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.salts.append(prompt["cache_salt"])
        await self.serving.wait()
        piece = SimpleNamespace(token_ids=[1], logprobs=SimpleNamespace(logprobs=[-0.5]))
        piece.weight_versions = [SimpleNamespace(version=str(self.weights), start=0, end=1)]
        piece.finish_reason = "length"
        yield SimpleNamespace(num_cached_tokens=0, outputs=[piece], finished=True)


def engine_on(core: StandIn) -> VllmEngine:
    numbers = {"vocabulary": 8, "slots": 2, "max_length": 8, "in_flight": "keep_kv"}
    return VllmEngine(core, **numbers)  # pyright: ignore[reportArgumentType]


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 60))


def test_a_session_that_begins_during_an_update_waits_for_its_end() -> None:
    async def scenario() -> tuple[StandIn, Generation]:
        core = StandIn()
        engine = engine_on(core)
        core.serving.set()
        update = asyncio.create_task(engine.adopt(V1))
        await core.paused.wait()
        turn = asyncio.create_task(engine.generate(request([1], "new")))
        await asyncio.sleep(0.01)
        assert not core.salts
        core.swapping.set()
        await update
        return core, await turn

    core, out = run(scenario())
    assert core.salts == ["1"] and out.weights == [V1]


def test_a_session_without_a_token_begins_again_behind_an_update() -> None:
    """Its prompt can be waiting for a slot, or half computed; a session that has one goes on."""

    async def scenario() -> tuple[StandIn, VllmEngine, list[Generation]]:
        core = StandIn()
        engine = engine_on(core)
        core.serving.set()
        await engine.generate(request([1], "old"))
        core.serving.clear()
        turns = [
            asyncio.create_task(engine.generate(request([1], one))) for one in ("old", "new", "b")
        ]
        await until(lambda: len(core.salts) == 4)
        core.swapping.set()
        await engine.adopt(V1)
        await until(lambda: len(core.salts) == 6)
        await engine.adopt(V2)
        await until(lambda: len(core.salts) == 8)
        core.serving.set()
        return core, engine, await asyncio.gather(*turns)

    core, engine, outs = run(scenario())
    assert core.salts == ["0"] * 4 + ["1"] * 2 + ["2"] * 2
    assert all(out.weights == [V2] for out in outs)
    assert engine.stats()["stale"] == 1, "of the old session alone"
    assert not engine._beginning


def test_a_first_turn_that_was_cancelled_leaves_no_salt_for_the_next() -> None:
    async def scenario() -> StandIn:
        core = StandIn()
        engine = engine_on(core)
        turn = asyncio.create_task(engine.generate(request([1], "a")))
        await until(lambda: core.salts)
        turn.cancel()
        await asyncio.wait([turn])
        core.swapping.set()
        core.serving.set()
        await engine.adopt(V1)
        await engine.generate(request([1], "a"))
        return core

    assert run(scenario()).salts == ["0", "1"]


def test_scoring_that_has_lost_the_engine_is_not_repeated() -> None:
    from vllm.v1.engine.exceptions import (  # pyright: ignore[reportMissingImports]
        EngineDeadError,
    )

    class Dying(StandIn):
        async def generate(self, prompt: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
            raise EngineDeadError
            yield

    async def scenario() -> Dying:
        core = Dying()
        with pytest.raises(EngineLost):
            await engine_on(core).score([1, 2])
        return core

    assert run(scenario()).lost == 1
