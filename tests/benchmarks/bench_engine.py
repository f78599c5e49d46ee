"""Speed of the torch engine: against transformers' `generate`, and in the pattern of training.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_engine.py

Both sides sample from the plain softmax at temperature 1 on one thread; ours returns log-probs
too. The two take turns; the ratio is the median over rounds, of each of which the best of two calls
of either side counts, because the machine is shared.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from actors.engines.base import Request
from actors.engines.torch_engine import TorchEngine
from evolver_async.model.policy import load_model, load_tokenizer, make_tiny
from evolver_async.schema import WeightId

BATCH, PROMPT, NEW, ROUNDS = 16, 32, 128, 8
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


async def ours(engine: TorchEngine, prompts: torch.Tensor) -> float:
    """Tokens/s of one batch of fresh prompts."""
    start = time.perf_counter()
    requests = [
        Request(tokens=row, max_tokens=NEW, temperature=1.0, session=str(index), seed=index)
        for index, row in enumerate(prompts.tolist())
    ]
    await asyncio.gather(*(engine.generate(request) for request in requests))
    seconds = time.perf_counter() - start
    for request in requests:
        engine.release(request.session)
    return BATCH * NEW / seconds


@torch.inference_mode()
def theirs(model: Any, prompts: torch.Tensor) -> float:
    start = time.perf_counter()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        pad_token_id=0,
    )
    return BATCH * NEW / (time.perf_counter() - start)


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


def main() -> None:
    torch.set_num_threads(1)
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
