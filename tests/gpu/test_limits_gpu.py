"""What bounds a GPU: bytes a parameter, chunks of log-probs, copies to the host, long rows."""

import time
from collections.abc import Callable

import torch
from figures import Figure
from gpu_models import HALF_BILLION, SMALL, TOKENIZER, model_on

from evolver_async.model import layers, policy
from evolver_async.model.attention import NAME as PACKED
from evolver_async.model.attention import Borders

VOCABULARY = {"cpu": len(TOKENIZER), "cuda": 151936}
ROWS = {"cpu": (128, 256, 512), "cuda": (32768, 65536, 131072)}
STAGED_BYTES = {"cpu": 1 << 22, "cuda": 1 << 30}


def seconds(device: torch.device, call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def test_chunks_of_logprobs_change_time_and_memory_alone(
    device: torch.device, figure: Figure
) -> None:
    model = model_on(device, "float32" if device.type == "cpu" else "bfloat16")
    tokens = 64 if device.type == "cpu" else 8192
    assert model.config.vocab_size == VOCABULARY[device.type]
    tokens_BT = torch.randint(len(TOKENIZER), (1, tokens + 1)).to(device)
    hidden = torch.randn(1, tokens + 1, model.config.hidden_size).to(device, model.dtype)
    found = []
    for rows in (16, 64, 256, 1024):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        held = hidden.clone().requires_grad_()

        def step(held: torch.Tensor = held, rows: int = rows) -> None:
            logprobs_BT, _ = policy.token_logprobs(
                model, tokens_BT, torch.ones_like(tokens_BT), chunk=rows, hidden_BTD=held
            )
            logprobs_BT.sum().backward()
            found.append(logprobs_BT.detach())

        figure(f"log-probs, chunks of {rows}", tokens / seconds(device, step), "tokens/s")
        figure(f"log-probs, chunks of {rows}, peak", peak(device), "GiB")
        model.zero_grad()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-2, rtol=1e-2)


def test_staging_from_pinned_and_from_pageable_memory(device: torch.device, figure: Figure) -> None:
    source = torch.randint(0, 255, (STAGED_BYTES[device.type],), dtype=torch.uint8).to(device)
    for kind in ("pageable", "pinned") if device.type == "cuda" else ("pageable",):
        target = torch.empty(len(source), dtype=torch.uint8, pin_memory=kind == "pinned")
        target.copy_(source)  # touches it for the first time
        spent = min(seconds(device, lambda to=target: to.copy_(source)) for _ in range(5))
        figure(f"copy to {kind} memory", len(source) / spent / 1e9, "GB/s")
        assert torch.equal(target, source.cpu())


def test_rows_as_long_as_contexts_get(device: torch.device, figure: Figure) -> None:
    """One packed row, forward and backward with recomputed layers."""
    model = model_on(device, "float32" if device.type == "cpu" else "bfloat16")
    model.set_attn_implementation(PACKED)
    layers.checkpoint_layers(model)
    shape = SMALL if device.type == "cpu" else HALF_BILLION
    assert model.config.hidden_size == shape.hidden_size
    for length in ROWS[device.type]:
        tokens_1T = torch.randint(len(TOKENIZER), (1, length)).to(device)
        borders = Borders.of([length // 2, length - length // 2], device)
        select_1T = torch.ones_like(tokens_1T)
        select_1T[:, [0, length // 2]] = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

        def step(tokens=tokens_1T, select=select_1T, borders=borders) -> None:
            logprobs_1T, _ = policy.token_logprobs(
                model, tokens, torch.ones_like(tokens), select_BT=select, borders=borders
            )
            assert bool(torch.isfinite(logprobs_1T).all())
            logprobs_1T.mean().backward()

        figure(f"row of {length} tokens", length / seconds(device, step), "tokens/s")
        figure(f"row of {length} tokens, peak", peak(device), "GiB")
        assert all(bool(torch.isfinite(one.grad).all()) for one in model.parameters())
        model.zero_grad()
