"""Speed of the torch engine: against transformers' `generate`, and in the pattern of training.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_engine.py
    OMP_NUM_THREADS=1 python tests/benchmarks/bench_engine.py --model models/SmolLM2-135M-Instruct

With `--model` batches of 16 and 64 take turns; `--bfloat16` adds our engine with its products in
bfloat16, whose speed is also given beside that in float32. Ratios are also of processor time, which
other programs disturb less.

Both sides sample from the plain softmax at temperature 1 on one thread; ours returns log-probs
too. The two take turns; the ratio is the median over rounds, of each of which the best of two calls
of either side counts, because the machine is shared.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from actors.engines.engine import Request
from actors.engines.torch_engine import TorchEngine
from evolver_async.model.policy import load_model, load_tokenizer, make_tiny
from evolver_async.model.precision import load_policy
from evolver_async.schema import WeightId

BATCH, PROMPT, NEW, ROUNDS = 16, 32, 128, 8
MODEL_BATCHES, MODEL_NEW, MODEL_ROUNDS = (16, 64), 32, 3
CALLS = 2  # of either side in a round, of which the faster one counts
EPISODES, TURNS, TURN_TOKENS, FIRST_PROMPT = 64, 8, 28, 60
REQUIRED = {(64, 2): 2.5, (128, 2): 2.0, (256, 4): 1.6}  # ratio by hidden size and layers


def make_engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TorchEngine:
    return TorchEngine(
        model,
        tokenizer,
        weights=WeightId(lineage=1, step=0),
        slots=EPISODES,
        max_length=1024,
        prefill_tokens=4096,
        in_flight="keep",
    )


async def ours(engine: TorchEngine, prompts: torch.Tensor, new: int = NEW) -> float:
    """Tokens/s of one batch of fresh prompts."""
    start = time.perf_counter()
    requests = [
        Request(tokens=row, max_tokens=new, temperature=1.0, session=str(index), seed=index)
        for index, row in enumerate(prompts.tolist())
    ]
    await asyncio.gather(*(engine.generate(request) for request in requests))
    seconds = time.perf_counter() - start
    for request in requests:
        engine.release(request.session)
    return len(prompts) * new / seconds


@torch.inference_mode()
def theirs(model: Any, prompts: torch.Tensor, new: int = NEW) -> float:
    start = time.perf_counter()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
    )
    return len(prompts) * new / (time.perf_counter() - start)


async def compare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[float, float]]:
    """Tokens/s of ours and of `generate` in each round."""
    engine = make_engine(model, tokenizer)
    rounds = []
    for round_ in range(ROUNDS):
        generator = torch.Generator().manual_seed(round_)
        prompts = torch.randint(0, len(tokenizer), (BATCH, PROMPT), generator=generator)
        calls = [(await ours(engine, prompts), theirs(model, prompts)) for _ in range(CALLS)]
        mine, generate = map(max, zip(*calls, strict=True))
        rounds.append((mine, generate))
    await engine.close()
    return rounds


async def episodes(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Concurrent episodes of short turns in groups of 8 that share their first prompt."""
    engine = make_engine(model, tokenizer)

    async def episode(round_: int, index: int) -> None:
        generator = torch.Generator().manual_seed(round_ * EPISODES + index // 8)
        text = torch.randint(0, 256, (FIRST_PROMPT + TURNS * TURN_TOKENS,), generator=generator)
        context = text[:FIRST_PROMPT].tolist()
        for turn in range(TURNS):
            request = Request(
                tokens=context,
                max_tokens=2 + (index + turn) % 2,
                temperature=1.0,
                session=f"{round_}/{index}",
                seed=index * TURNS + turn,  # members part, as in training
            )
            context = context + (await engine.generate(request)).tokens
            start = FIRST_PROMPT + turn * TURN_TOKENS
            context = context + text[start : start + TURN_TOKENS].tolist()
        engine.release(f"{round_}/{index}")

    best, share = 0.0, 0.0
    for round_ in range(ROUNDS):
        before = engine.stats()
        start = time.perf_counter()
        await asyncio.gather(*(episode(round_, index) for index in range(EPISODES)))
        seconds = time.perf_counter() - start
        if EPISODES / seconds > best:
            best = EPISODES / seconds
            share = (engine.stats()["forward_s"] - before["forward_s"]) / seconds
    await engine.close()
    return f"{best:.0f} episodes/s ({best * TURNS:.0f} turns/s), model forward {share:.0%}"


async def compare_model(path: str, batch: int, with_short: bool) -> None:
    """Print the medians of alternating rounds of a model's engines and its `generate`."""
    model, tokenizer = load_model(path, dtype="float32", device="cpu"), load_tokenizer(path)
    engines = {"float32": make_engine(model, tokenizer)}
    if with_short:
        short = load_policy(path, dtype="bfloat16", device="cpu")
        engines["bfloat16"] = make_engine(short, tokenizer)
    sides = [*engines, "generate"]
    wall, spent = ({side: list[float]() for side in sides} for _ in range(2))
    for round_ in range(-1, MODEL_ROUNDS):  # the first one warms up
        generator = torch.Generator().manual_seed(round_ + 1)
        prompts = torch.randint(0, len(tokenizer), (batch, PROMPT), generator=generator)
        for side in sides:
            start = time.process_time()
            if side == "generate":
                speed = theirs(model, prompts, MODEL_NEW)
            else:
                speed = await ours(engines[side], prompts, MODEL_NEW)
            if round_ >= 0:
                wall[side].append(speed)
                spent[side].append(time.process_time() - start)
    for engine in engines.values():
        await engine.close()

    def ratio(one: str, other: str) -> str:
        speeds = [a / b for a, b in zip(wall[one], wall[other], strict=True)]
        times = [b / a for a, b in zip(spent[one], spent[other], strict=True)]
        return f"{statistics.median(speeds):.2f} ({statistics.median(times):.2f} by processor time)"

    said = ", ".join(f"{side} {statistics.median(wall[side]):.0f}" for side in sides)
    print(f"batch {batch}: tokens/s {said}; beside generate {ratio('float32', 'generate')}")
    if with_short:
        print(f"batch {batch}: bfloat16 beside float32 {ratio('bfloat16', 'float32')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="a model's directory")
    parser.add_argument("--bfloat16", action="store_true", help="products in bfloat16, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.model:
        for batch in MODEL_BATCHES:
            asyncio.run(compare_model(arguments.model, batch, arguments.bfloat16))
        return
    for (hidden, layers), required in REQUIRED.items():
        with tempfile.TemporaryDirectory() as directory:
            make_tiny(
                Path(directory),
                seed=0,
                hidden_size=hidden,
                layers=layers,
                heads=4,
                intermediate_size=3 * hidden,
                max_length=1024,
            )
            model = load_model(directory, dtype="float32", device="cpu")
            tokenizer = load_tokenizer(directory)
        rounds = asyncio.run(compare(model, tokenizer))
        mine, generate = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
        ratios = sorted(one / other for one, other in rounds)
        print(
            f"{hidden}x{layers}: {mine:.0f} tokens/s, generate {generate:.0f}, ratio "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}; {required} "
            f"wanted); {asyncio.run(episodes(model, tokenizer))}"
        )


if __name__ == "__main__":
    main()
