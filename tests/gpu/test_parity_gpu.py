"""The torch engine and the learner mean the same by a log-prob, on a GPU and in bfloat16 too.

In bfloat16 a logit of size 8 is off by up to 1/32, and engine and learner round differently: one
token at a time against whole sequences. What is bounded is what training feels of it: the mean
difference, its tail, and that importance weights are 1 on average.
"""

import asyncio
import time
from pathlib import Path

import pytest
import torch
from engine_conformance import CONFORMANCE, V0, V1, setting
from gpu_models import (
    NEW,
    REQUESTS,
    SMALL,
    TOKENIZER,
    assert_close,
    differences,
    model_on,
    requests,
)
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from actors.engines.engine import Engine, Generation, Request
from actors.engines.torch_engine import TorchEngine
from evolver_async.model.policy import load_state, state_tensors
from evolver_async.weights.shm import ShmPublisher, ShmReceiver


def engine_of(model: PreTrainedModel) -> TorchEngine:
    return TorchEngine(
        model,
        TOKENIZER,
        weights=V0,
        slots=REQUESTS,
        max_length=256,
        prefill_tokens=4096,
        in_flight="keep",
    )


async def play(engine: Engine, asked: list[Request]) -> list[Generation]:
    try:
        return list(await asyncio.gather(*(engine.generate(one) for one in asked)))
    finally:
        await engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_learner_gives_what_the_engine_sampled_the_same_log_prob(device, dtype, figure):
    model, asked = model_on(device, dtype), requests()
    given = asyncio.run(play(engine_of(model), asked))
    assert all(len(out.tokens) == NEW for out in given)
    delta_N = differences(model, asked, given)
    assert torch.cat([torch.tensor(out.logprobs) for out in given]).min() < -2
    assert_close(delta_N, dtype, figure, "engine and learner")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_published_from_the_device_are_what_the_engine_generates_with(
    device, dtype, figure, tmp_path: Path
):
    """Through shared memory, in the middle of generations: what comes after it is of the new."""
    model, oracle = model_on(device, dtype), model_on(device, dtype)
    generator = torch.Generator(device=device).manual_seed(2)
    newer = {
        name: tensor
        + (0.2 * tensor.float().std(correction=0)).to(tensor.dtype)
        * torch.randn(tensor.shape, generator=generator, device=device, dtype=tensor.dtype)
        for name, tensor in state_tensors(oracle).items()
    }
    before = {name: tensor.clone() for name, tensor in state_tensors(oracle).items()}
    publisher = ShmPublisher(tmp_path / "weights")
    engine, asked = engine_of(model), requests()

    async def scenario() -> list[Generation]:
        running = asyncio.create_task(play(engine, asked))
        while engine.stats()["generated"] < REQUESTS * NEW // 4:
            await asyncio.sleep(0)
        publisher.publish(V1, newer)
        publisher.wait()
        tensors = ShmReceiver(tmp_path / "weights").fetch(V1)
        assert all(torch.equal(tensors[name], newer[name].cpu()) for name in newer)
        await engine.update(V1, tensors)
        return await running

    given = asyncio.run(scenario())
    publisher.close()
    for version, weights in ((V0, before), (V1, newer)):
        load_state(oracle, weights)
        mine_N = torch.tensor([tag == version for out in given for tag in out.weights])
        assert mine_N.sum() >= REQUESTS * NEW // 8
        delta_N = differences(oracle, asked, given)
        assert_close(delta_N[mine_N], dtype, figure, f"weights of step {version.step}")
        assert delta_N[~mine_N].abs().mean() > 10 * delta_N[mine_N].abs().mean(), "they differ"


@pytest.mark.gpu
@pytest.mark.parametrize("promise", CONFORMANCE, ids=lambda promise: promise.__name__)
def test_the_torch_engine_keeps_its_promises_on_a_gpu(promise):
    """The oracle stays on the CPU; float32, so with its tolerance."""
    torch.manual_seed(0)
    shape = SMALL.to_dict() | {"initializer_range": 0.1}
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(**shape), attn_implementation="sdpa"
    ).eval()

    def on_gpu(model: PreTrainedModel, tokenizer: object, **numbers: object) -> TorchEngine:
        return TorchEngine(model.to("cuda"), tokenizer, **numbers)

    promise(setting(on_gpu, model, TOKENIZER))


def test_publishing_stops_the_step_only_for_the_copy(device, figure, tmp_path: Path):
    """The staging copy alone is waited for; checksums and files are the background's."""
    tensors = state_tensors(model_on(device, "bfloat16"))
    size = sum(tensor.nbytes for tensor in tensors.values())
    publisher = ShmPublisher(tmp_path / "weights")
    blocked, whole = [], []
    for _ in range(4):
        blocked.append(seconds(lambda: publisher.publish(V1, tensors)))
        whole.append(blocked[-1] + seconds(publisher.wait))
    publisher.close()
    figure("publish blocks the step", size / min(blocked) / 1e9, "GB/s")
    figure("publish in all", size / min(whole) / 1e9, "GB/s")
    assert min(blocked) <= min(whole)


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
