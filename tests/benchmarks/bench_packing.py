"""What packed rows save: forward and backward passes over rows of very different lengths.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_packing.py

The same rows, whose lengths have a coefficient of variation of about 1, three ways under one token
budget: padded in the order that they come in, padded sorted by length (`learner.packing: false`)
and packed (`true`). On a GPU the model has the shape of half a billion parameters in bfloat16 and
packed rows against unsorted ones are required to be `REQUIRED` times as fast; on a CPU it is small.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from micro_batches import actions
from varied import varied

from evolver_async.model import policy
from learner.data.batch import Batch, MicroBatch, lay_out

REQUIRED = 1.5
ROUNDS = 3


@dataclass(frozen=True)
class Scale:
    """A model and its rows."""

    shape: Qwen3Config
    dtype: torch.dtype
    rows: int
    mean: int
    budget: int


CPU = Scale(
    Qwen3Config(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=1024,
    ),
    torch.float32,
    rows=64,
    mean=120,
    budget=4096,
)
GPU = Scale(
    Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=32768,
        max_position_embeddings=16384,
    ),
    torch.bfloat16,
    rows=256,
    mean=1024,
    budget=16384,
)


def unsorted(batch: Batch, budget: int, device: torch.device) -> Iterator[MicroBatch]:
    """Rows padded in the order that they come in, at most `budget` tokens at a time."""
    pending: list[int] = []
    lengths_R = (batch.row_start_R[1:] - batch.row_start_R[:-1]).tolist()
    for row, length in enumerate(lengths_R):
        widest = max([length, *(lengths_R[other] for other in pending)])
        if pending and widest * (len(pending) + 1) > budget:
            yield lay_out(batch, np.array(pending), device, "padded")
            pending = []
        pending.append(row)
    yield lay_out(batch, np.array(pending), device, "padded")


def seconds(model: torch.nn.Module, cut: Callable[[], Iterator[MicroBatch]]) -> tuple[float, int]:
    """The fastest of some forward and backward passes over all rows, and their tokens, padding
    included."""
    device, best, tokens = next(model.parameters()).device, float("inf"), 0
    for _ in range(ROUNDS):
        tokens, start = 0, time.perf_counter()
        for micro in cut():
            tokens += micro.tokens_BT.numel()
            logprobs_BT, _ = policy.token_logprobs(
                model,
                micro.tokens_BT,
                micro.attention_BT,
                select_BT=actions(micro),
                borders=micro.borders,
            )
            (-logprobs_BT.sum() / 1000).backward()
        model.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best, tokens


def compare(scale: Scale, device: torch.device) -> dict[str, tuple[float, int]]:
    """Seconds and tokens of a pass over the same rows, by way."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(scale.shape, attn_implementation="sdpa")
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        dtype = str(scale.dtype).removeprefix("torch.")
        model = policy.load_model(directory, dtype=dtype, device=str(device))
    batch = varied(scale.rows, scale.mean, scale.shape.vocab_size)
    whole = batch.whole()
    return {
        "unsorted": seconds(model, lambda: unsorted(batch, scale.budget, device)),
        "sorted": seconds(model, lambda: whole.micro_batches(scale.budget, device)),
        "packed": seconds(model, lambda: whole.micro_batches(scale.budget, device, "packed")),
    }


def main() -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scale = GPU if device.type == "cuda" else CPU
    found = compare(scale, device)
    real = found["packed"][1]
    for way, (taken, tokens) in found.items():
        print(
            f"{way:>8}: {tokens} tokens ({real / tokens:.0%} real), {taken:.2f} s, "
            f"{real / taken:.0f} real tokens/s, {found['unsorted'][0] / taken:.2f} x unsorted"
        )
    if device.type == "cuda":
        assert found["unsorted"][0] >= REQUIRED * found["packed"][0]


if __name__ == "__main__":
    main()
