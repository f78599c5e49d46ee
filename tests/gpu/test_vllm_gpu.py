"""vLLM beside the learner's own model: the same log-probs in bfloat16, before and after updates.

Wants an environment with vLLM: its CUDA build for the GPU, `.venv-vllm` for the CPU.
"""

import asyncio
import time
from pathlib import Path

import pytest
import torch
from engine_conformance import V0, V1
from gpu_models import TOKENIZER, assert_close, differences, model_on, requests
from vllm_engines import publish

from actors.engines.base import Engine, Generation
from actors.engines.factory import load_engine
from actors.engines.vllm_engine import VllmEngine
from evolver_async.config import Config
from evolver_async.model.policy import load_state, state_tensors

pytest.importorskip("vllm.version")  # tests/vllm alone would pass for a package
pytestmark = pytest.mark.vllm

MEMORY, KV_BYTES = 0.3, 1 << 30  # beside the learner's model


@pytest.fixture
def config(device: torch.device, tmp_path: Path) -> Config:
    """An engine of the half-billion shape on a GPU, of a small one on the CPU."""
    config = Config()
    config.policy.path, config.policy.dtype = str(tmp_path), "bfloat16"
    config.policy.max_length = 256
    config.engine.kind, config.engine.device = "vllm", device.type
    config.engine.slots, config.engine.memory = 16, MEMORY
    config.engine.kv_cache_bytes = KV_BYTES if device.type == "cuda" else 0
    return config


async def wave(engine: Engine, name: str) -> list[Generation]:
    """All requests once, as sessions of their own."""
    asked = requests(name)
    given = await asyncio.gather(*(engine.generate(one) for one in asked))
    for one in asked:
        engine.release(one.session)
    return list(given)


def test_vllm_samples_what_the_learner_scores_before_and_after_an_update(device, config, figure):
    oracle = model_on(device, "bfloat16")
    oracle.save_pretrained(config.policy.path)
    TOKENIZER.save_pretrained(config.policy.path)
    before = {name: tensor.clone() for name, tensor in state_tensors(oracle).items()}
    newer = {name: tensor * 1.1 for name, tensor in before.items()}

    async def scenario(engine: VllmEngine) -> list[list[Generation]]:
        try:
            await wave(engine, "warm")
            start = time.perf_counter()
            old = await wave(engine, "old")
            spent = time.perf_counter() - start
            figure("vLLM", sum(len(out.tokens) for out in old) / spent, "tokens/s")
            running = asyncio.create_task(wave(engine, "both"))
            await asyncio.sleep(spent / 3)
            start = time.perf_counter()
            await publish(engine, engine.core, V1, newer)
            figure("vLLM, an update in flight", time.perf_counter() - start, "s")
            return [old, await running, await wave(engine, "new")]
        finally:
            await engine.close()

    engine, _ = load_engine(config, V0)
    assert isinstance(engine, VllmEngine)
    old, both, new = asyncio.run(scenario(engine))
    assert {tag for out in old for tag in out.weights} == {V0}
    assert {tag for out in new for tag in out.weights} == {V1}
    for version, weights, waves in ((V0, before, (old, both)), (V1, newer, (both, new))):
        load_state(oracle, weights)
        deltas, tags = [], []
        for given in waves:
            deltas.append(differences(oracle, requests(""), given))
            tags += [tag == version for out in given for tag in out.weights]
        assert_close(
            torch.cat(deltas)[torch.tensor(tags)], "bfloat16", figure, f"vLLM, step {version.step}"
        )
