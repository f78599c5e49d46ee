"""vLLM with an adapter on its base weights samples as the adapted model that the learner trains."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_conformance import RUNNER, TOLERANCE, V0, V1, V2, Setting, generate_all, request
from torch import Tensor
from vllm_engines import SLOTS, TOKENIZER, engine_of, make_model, save, settings

from actors.engines.engine import Generation
from actors.engines.vllm_core import VllmCore
from actors.engines.vllm_engine import VllmEngine
from actors.engines.vllm_lora import Adapter, adapter_of
from evolver_async.config import Config
from evolver_async.memory.vllm_limits import CPU_BLOCK
from evolver_async.model import lora
from evolver_async.model.policy import ModelError, load_state, state_tensors, token_logprobs

pytestmark = pytest.mark.vllm
ADAPTER = Adapter(name="run-7", rank=4, alpha=8.0)
DEADLINE_S = 500  # a restart of vLLM included
SCORES = 5  # asked for beside turns


@dataclass
class Adapted:
    core: VllmCore
    setting: Setting
    base: dict[str, Tensor]

    def engine(self, in_flight: str = "keep") -> VllmEngine:
        self.core.keeps_kv = in_flight == "keep_kv"
        return engine_of(self.core, in_flight=in_flight)


@pytest.fixture(scope="module", params=["qwen3", "llama over two processes"])
def adapted(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    name, *spread = request.param.split(maxsplit=1)
    model = make_model(name).eval()
    path = save(model, tmp_path_factory.mktemp(name))
    base = {name: tensor.clone() for name, tensor in state_tensors(model).items()}
    lora.inject(model, rank=ADAPTER.rank, alpha=ADAPTER.alpha, targets=[], seed=0)
    first = {name: tensor.clone() for name, tensor in state_tensors(model).items()}
    versions = {V0: first}
    for version in (V1, V2):
        draws = torch.Generator().manual_seed(version.step)
        versions[version] = {
            name: tensor
            if name == lora.BASE
            else tensor + 0.1 * torch.randn(tensor.shape, generator=draws)
            for name, tensor in first.items()
        }
    shards = 2 if spread else 1
    core = VllmCore(settings(path, adapter=ADAPTER, tensor_parallel=shards), V0, versions[V0])
    yield Adapted(core, Setting(lambda *_, **__: None, model, TOKENIZER, versions, CPU_BLOCK), base)  # pyright: ignore
    RUNNER.run(core.close())


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return RUNNER.run(asyncio.wait_for(scenario, DEADLINE_S))


def test_every_version_of_an_adapter_samples_as_the_adapted_model(adapted: Adapted) -> None:
    s, engine = adapted.setting, adapted.engine()
    many = [request(s.prompt(20 + i, i), str(i), seed=i) for i in range(SLOTS)]

    async def scenario() -> list[Generation]:
        found = []
        for version in (V0, V1, V2, V1):
            await engine.update(version, s.versions[version])
            found += await generate_all(engine, many)
        return found

    outs = run(scenario())
    assert [out.weights[0] for out in outs[::SLOTS]] == [V0, V1, V2, V1]
    for one, out in zip(many * 4, outs, strict=True):
        s.check(one, out)
    for first, later in zip(outs[:SLOTS], outs[SLOTS : 2 * SLOTS], strict=True):
        assert first.logprobs != later.logprobs, "the adapter changes what is sampled"


@pytest.mark.parametrize("adapted", ["qwen3", "llama over two processes", "gemma3"], indirect=True)
def test_scores_beside_turns_are_those_of_the_adapted_model(adapted: Adapted) -> None:
    """vLLM's layer of an adapter for the output projection, which it gives Llama and Qwen3, dies of
    this."""
    s, engine = adapted.setting, adapted.engine()
    tokens = s.prompt(60, 12)
    many = [request(s.prompt(20 + i, i), str(i), max_tokens=200, seed=i) for i in range(6)]

    async def scenario() -> list[list[float]]:
        found = []
        for version in (V1, V2):
            await engine.update(version, s.versions[version])
            running = asyncio.create_task(generate_all(engine, many))
            sampled = engine.stats()["generated"]
            while engine.stats()["generated"] < sampled + 6:
                await asyncio.sleep(0)
            found.append([await engine.score(tokens) for _ in range(SCORES)])
            await running
        return found

    before = adapted.core.restarts
    for version, scores in zip((V1, V2), run(scenario()), strict=True):
        load_state(s.model, s.versions[version])
        row = torch.tensor([tokens])
        with torch.no_grad():
            logprobs, _ = token_logprobs(s.model, row, torch.ones_like(row))
        for one in scores:
            assert one == pytest.approx(logprobs[0, 1:].tolist(), abs=TOLERANCE)
    assert adapted.core.restarts == before


@pytest.mark.parametrize("in_flight", ["keep", "keep_kv"])
def test_running_requests_continue_under_the_next_adapter(adapted: Adapted, in_flight: str) -> None:
    s, engine = adapted.setting, adapted.engine(in_flight)
    many = [request(s.prompt(20 + i, i), str(i), max_tokens=40, seed=i) for i in range(SLOTS)]

    async def scenario() -> list[Generation]:
        await engine.update(V1, s.versions[V1])
        running = asyncio.create_task(generate_all(engine, many))
        while engine.stats()["generated"] < 10 * SLOTS:
            await asyncio.sleep(0)
        await engine.update(V2, s.versions[V2])
        return await running

    check = s.check if in_flight == "keep" else s.check_over_stale_kv
    outs = run(scenario())
    assert {tag for out in outs for tag in out.weights} == {V1, V2}
    for one, out in zip(many, outs, strict=True):
        check(one, out)


def test_adapters_of_other_weights_and_whole_weights_are_refused(adapted: Adapted) -> None:
    s, engine = adapted.setting, adapted.engine()
    one = request(s.prompt(20, 0), "a")
    foreign = s.versions[V2] | {lora.BASE: s.versions[V2][lora.BASE].flip(0)}

    async def scenario() -> list[Generation]:
        await engine.update(V1, s.versions[V1])
        for tensors, problem in ((foreign, r"policy\.path"), (adapted.base, "missing|unknown")):
            with pytest.raises(ModelError, match=problem):
                await engine.update(V2, tensors)
        return await generate_all(engine, [one])

    (out,) = run(scenario())
    assert set(out.weights) == {V1}
    s.check(one, out)


@pytest.mark.parametrize("adapted", ["qwen3"], indirect=True)
def test_an_engine_that_died_continues_with_the_newest_adapter(adapted: Adapted) -> None:
    s, engine, core = adapted.setting, adapted.engine(), adapted.core
    one = request(s.prompt(20, 0), "a")

    async def scenario() -> list[Generation]:
        await engine.update(V2, s.versions[V2])
        core.lose(await core.ready())
        return await generate_all(engine, [one])

    (out,) = run(scenario())
    assert core.restarts == 1 and set(out.weights) == {V2}
    s.check(one, out)


def test_runs_have_adapters_of_their_own() -> None:
    names = [Adapter(name=name, rank=4, alpha=8.0) for name in ("run-7", "run-8")]
    assert len({one.number for one in names}) == 2
    assert [one.request().lora_name for one in names] == ["run-7", "run-8"]
    assert names[0].request() != names[1].request()


@pytest.mark.parametrize(("rank", "merge"), [(4, False), (4, True), (600, False), (0, False)])
def test_adapters_are_merged_where_vllm_cannot_serve_them(
    rank: int, merge: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config()
    config.policy.path = str(save(make_model("llama"), tmp_path))
    config.run.name, config.policy.lora.rank, config.engine.merge_lora = "mine", rank, merge
    adapter = adapter_of(config)
    assert (adapter is not None and adapter.name == "mine") == (rank == 4 and not merge)
    assert ("policy.lora" in caplog.text) == (rank == 600)
