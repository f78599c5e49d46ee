"""vLLM beside the learner's own model: the same log-probs in bfloat16, before and after updates.

Wants an environment with vLLM: its CUDA build for the GPU, `.venv-vllm` for the CPU. On the GPU
with captured graphs too, by either of vLLM's model runners, for whole weights and for adapters.
"""

import asyncio
import time
from pathlib import Path

import pytest
import torch
from engine_conformance import V0, V1
from figures import Figure
from gpu_models import TOKENIZER, assert_close, differences, model_on, requests
from torch import Tensor
from transformers import PreTrainedModel
from vllm_engines import publish

from actors.engines.engine import Engine, Generation
from actors.engines.factory import load_engine
from actors.engines.vllm_engine import VllmEngine
from evolver_async.config import Config
from evolver_async.model import lora
from evolver_async.model.policy import load_state, state_tensors

pytest.importorskip("vllm.version")  # tests/vllm alone would pass for a package
pytestmark = pytest.mark.vllm

MEMORY, KV_BYTES = 0.3, 1 << 30  # beside the learner's model
RANK, ALPHA = 16, 32.0
RUNNERS = {"V1": "0", "V2": "1"}  # VLLM_USE_V2_MODEL_RUNNER


def config_on(device: torch.device, path: Path, eager: str) -> Config:
    """An engine of the half-billion shape on a GPU, of a small one on the CPU."""
    config = Config()
    config.policy.path, config.policy.dtype = str(path), "bfloat16"
    config.policy.max_length = 256
    config.engine.kind, config.engine.device = "vllm", device.type
    config.engine.slots, config.engine.memory = 16, MEMORY
    config.engine.kv_cache_bytes = KV_BYTES if device.type == "cuda" else 0
    config.engine.eager = eager  # pyright: ignore[reportAttributeAccessIssue]
    return config


def saved_model(device: torch.device, path: Path) -> PreTrainedModel:
    oracle = model_on(device, "bfloat16")
    oracle.save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return oracle


async def wave(engine: Engine, name: str) -> list[Generation]:
    """All requests once, as sessions of their own."""
    asked = requests(name)
    given = await asyncio.gather(*(engine.generate(one) for one in asked))
    for one in asked:
        engine.release(one.session)
    return list(given)


def check_updates(
    config: Config, oracle: PreTrainedModel, newer: dict[str, Tensor], figure: Figure
) -> None:
    """Every token has the log-prob of its weights, before, during and after an update."""
    before = {name: tensor.clone() for name, tensor in state_tensors(oracle).items()}

    async def scenario(engine: VllmEngine) -> list[list[Generation]]:
        try:
            await publish(engine, engine.core, V0, before)
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

    engine, _ = load_engine(config)
    assert isinstance(engine, VllmEngine)
    assert (engine.core.adapter is not None) == bool(config.policy.lora.rank)
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


def warmer(oracle: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor * 1.1 for name, tensor in state_tensors(oracle).items()}


def test_vllm_samples_what_the_learner_scores_before_and_after_an_update(device, tmp_path, figure):
    oracle = saved_model(device, tmp_path)
    check_updates(config_on(device, tmp_path, "always"), oracle, warmer(oracle), figure)


@pytest.mark.gpu
@pytest.mark.parametrize("runner", RUNNERS)
def test_captured_graphs_read_the_weights_of_an_update_in_flight(
    runner, tmp_path, figure, monkeypatch
):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", RUNNERS[runner])
    oracle = saved_model(torch.device("cuda"), tmp_path)
    config = config_on(torch.device("cuda"), tmp_path, "auto")
    check_updates(config, oracle, warmer(oracle), figure)


def check_adapters(device: torch.device, path: Path, eager: str, figure: Figure) -> None:
    oracle, config = saved_model(device, path), config_on(device, path, eager)
    config.policy.lora.rank, config.policy.lora.alpha = RANK, ALPHA
    lora.inject(oracle, rank=RANK, alpha=ALPHA, targets=[], seed=0)
    draws = torch.Generator().manual_seed(1)
    newer = {
        name: 0.01 * torch.randn(tensor.shape, generator=draws).to(device)
        if name.endswith(lora.UP)
        else tensor
        for name, tensor in state_tensors(oracle).items()
    }
    check_updates(config, oracle, newer, figure)


def test_an_unmerged_adapter_samples_what_the_learner_scores(device, tmp_path, figure):
    check_adapters(device, tmp_path, "always", figure)


@pytest.mark.gpu
@pytest.mark.parametrize("runner", RUNNERS)
def test_captured_graphs_read_the_adapter_of_an_update_in_flight(
    runner, tmp_path, figure, monkeypatch
):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", RUNNERS[runner])
    check_adapters(torch.device("cuda"), tmp_path, "auto", figure)
