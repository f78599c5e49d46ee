"""Speed of the vLLM engine against vLLM alone, and what an update in flight costs.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python tests/benchmarks/bench_vllm.py

Both sides use the same processes, one after the other: ours through `VllmEngine.generate`, the bare
one through `AsyncLLM.generate` with the same sampling, its pieces thrown away. The two take turns
and the best round of each counts, because the machine is shared. Then the weights are swapped under
a running batch, and every log-prob is compared with a forward pass of the weights it is labelled
with. Without vLLM it says so and ends.
"""

import asyncio
import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from actors.engines.engine import Generation, Request
from evolver_async.model.policy import (
    load_model,
    load_state,
    make_tiny,
    state_tensors,
    token_logprobs,
)
from evolver_async.schema import WeightId

BATCH, PROMPT, NEW, ROUNDS, UPDATES = 16, 32, 128, 8, 8
REQUIRED_RATIO, REQUIRED_PAUSE_S, REQUIRED_ERROR = 0.9, 0.1, 1e-4
V0 = WeightId(lineage=1, step=0)


def requests(vocabulary: int, seed: int) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, vocabulary, (BATCH, PROMPT), generator=generator).tolist()
    return [
        Request(tokens=prompt, max_tokens=NEW, temperature=1.0, session=str(i), seed=seed + i)
        for i, prompt in enumerate(prompts)
    ]


async def bare(llm: Any, request: Request, name: str) -> int:
    """The number of tokens that vLLM gives."""
    from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]

    from actors.engines.vllm_engine import _sampling

    count = 0
    params = _sampling(request, request.max_tokens)
    async for output in llm.generate(tokens_input(request.tokens), params, name):
        count += len(output.outputs[0].token_ids)
    return count


async def speeds(engine: Any) -> tuple[float, float]:
    """Tokens a second: ours and vLLM's own, the best rounds."""
    llm = await engine.core.ready()
    ours, theirs = [], []
    for turn in range(ROUNDS + 1):  # the first one warms up
        many = requests(engine.core.vocabulary, 1000 * turn)
        start = time.perf_counter()
        outs = await asyncio.gather(*map(engine.generate, many))
        ours.append(sum(len(out.tokens) for out in outs) / (time.perf_counter() - start))
        many = requests(engine.core.vocabulary, 1000 * turn + 500)
        start = time.perf_counter()
        calls = (bare(llm, one, f"bare-{turn}-{one.session}") for one in many)
        theirs.append(sum(await asyncio.gather(*calls)) / (time.perf_counter() - start))
    return max(ours[1:]), max(theirs[1:])


async def updates(engine: Any, model: Any) -> tuple[list[float], float]:
    """Pauses in seconds, and the greatest error of a log-prob against its own weights."""
    versions = {V0: {name: tensor.clone() for name, tensor in state_tensors(model).items()}}
    pauses, error = [], 0.0
    for step in range(1, UPDATES + 1):
        generator = torch.Generator().manual_seed(step)
        weights = WeightId(lineage=1, step=step)
        versions[weights] = {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in versions[V0].items()
        }
        many = requests(engine.core.vocabulary, step)
        running = asyncio.gather(*map(engine.generate, many))
        generated = engine.stats()["generated"]
        while engine.stats()["generated"] < generated + BATCH * NEW // 3:
            await asyncio.sleep(0.001)
        engine.core.publisher.publish(weights, versions[weights])
        await engine.stage(weights)
        await engine.adopt(weights)
        pauses.append(engine.core.pause_s)
        for request, out in zip(many, await running, strict=True):
            assert len(set(out.weights)) == 2, "the update came while it was generated"
            error = max(error, worst(model, versions, request, out))
    return pauses, error


def worst(model: Any, versions: dict[WeightId, Any], request: Request, out: Generation) -> float:
    """The greatest difference from log-probs of the weights that each token is labelled with."""
    tokens_BT = torch.tensor([request.tokens + out.tokens])
    error = 0.0
    for weights in set(out.weights):
        load_state(model, versions[weights])
        with torch.no_grad():
            logprobs_BT, _ = token_logprobs(model, tokens_BT, torch.ones_like(tokens_BT))
        mine = torch.tensor([label == weights for label in out.weights])
        got = torch.tensor(out.logprobs)[mine]
        error = max(error, float((got - logprobs_BT[0, PROMPT:][mine]).abs().max()))
    return error


async def measure(path: Path) -> None:
    from actors.engines.vllm_core import VllmCore
    from actors.engines.vllm_engine import VllmEngine
    from actors.engines.vllm_start import Settings

    settings = Settings(
        path=str(path),
        dtype="float32",
        directory="/dev/shm",
        slots=BATCH,
        max_length=PROMPT + NEW,
        prefill_tokens=BATCH * PROMPT,
    )
    start = time.perf_counter()
    core = VllmCore(settings, V0)
    print(f"started in {time.perf_counter() - start:.1f} s")
    engine = VllmEngine(
        core,
        vocabulary=core.vocabulary,
        slots=BATCH,
        max_length=PROMPT + NEW,
        in_flight="keep",
    )
    try:
        ours, theirs = await speeds(engine)
        print(
            f"ours {ours:.0f} tokens/s, bare AsyncLLM {theirs:.0f}, ratio {ours / theirs:.3f}"
            f" (required {REQUIRED_RATIO})"
        )
        model = load_model(path, dtype="float32", device="cpu")
        pauses, error = await updates(engine, model)
        listed = ", ".join(f"{1000 * pause:.0f}" for pause in sorted(pauses))
        print(
            f"pauses of updates in flight: {listed} ms (required {1000 * REQUIRED_PAUSE_S:.0f});"
            f" greatest log-prob error {error:.1e} (required {REQUIRED_ERROR:.0e})"
        )
    finally:
        await engine.close()


def main() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        print("vllm is not installed in this environment: see `make test-vllm`")
        return
    with tempfile.TemporaryDirectory() as directory:
        make_tiny(
            directory,
            seed=0,
            hidden_size=64,
            layers=2,
            heads=2,
            intermediate_size=128,
            max_length=PROMPT + NEW,
        )
        asyncio.run(measure(Path(directory)))


if __name__ == "__main__":
    main()
