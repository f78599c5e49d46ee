"""Packed rows on a GPU: as exact as padded ones, faster, and within the memory that they may have.

In bfloat16 the flash kernel and the padded rows' kernel round differently, so that what is bounded
is how far log-probs and gradients differ, beside the same in float32, where both are exact.
"""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from varied import varied

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import bench_packing
import bench_prefix_trees
from bench_packing import Scale
from micro_batches import actions

from evolver_async.model import flash, layers, policy, row_checks
from evolver_async.model.attention import packed_attention
from evolver_async.model.logit_chunks import LOGITS
from evolver_async.model.rows.borders import Borders
from learner.data.batch import Minibatch
from learner.optimize import token_budget
from learner.ranks.mesh import alone

LENGTHS = [300, 290, 257, 130, 128, 64, 63, 17, 1]
# of attention in bfloat16 against float32; of mean |log-prob| and of gradients, packed to padded
ATTENTION = 2e-2
BOUNDS = {"float32": (1e-5, 1e-4), "bfloat16": (2e-2, 5e-2)}
SHARPNESS = 4.0  # of the last norm: a random model would otherwise find all tokens equally likely
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def model_on(device: torch.device, dtype: str, **shape: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(**SMALL | shape), attn_implementation="sdpa", dtype=getattr(torch, dtype)
    )
    with torch.no_grad():
        model.model.norm.weight.mul_(SHARPNESS)
    return torch.nn.Module.to(model, device).eval()


def scored(model: Any, minibatch: Minibatch, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the batch's ACTION tokens in their order, and the gradient of their sum."""
    device = next(model.parameters()).device
    logprobs_N = torch.zeros(len(minibatch.batch.mu_N), device=device)
    for micro in minibatch.micro_batches(4096, device, "packed" if packed else "padded"):
        logprobs_BT, _ = policy.token_logprobs(
            model,
            micro.tokens_BT,
            micro.attention_BT,
            select_BT=actions(micro),
            borders=micro.borders,
        )
        logprobs_BT.sum().backward()
        logprobs_N[micro.index_N] = logprobs_BT[actions(micro)].detach()
    gradient = torch.cat([one.grad.flatten().float() for one in model.parameters()])
    model.zero_grad()
    return logprobs_N, gradient


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["heads", "grouped"])
@pytest.mark.parametrize("size", [64, 80])
def test_attention_is_that_of_each_sequence_in_float64(device, window, heads, size):
    """Forward and backward; bfloat16, on a GPU, by the flash kernel."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, count, sum(LENGTHS), size) for count in (heads[0], heads[1], heads[1])]
    drawn = [torch.randn(shape, generator=draw).to(dtype).double() for shape in shapes]
    weights = torch.randn(1, sum(LENGTHS), heads[0], size, generator=draw).double()
    exact = [one.clone().requires_grad_() for one in drawn]
    outs = []
    for part in zip(*(one.split(LENGTHS, 2) for one in exact), strict=True):
        query, key, value = (
            one if one.shape[1] == heads[0] else one.repeat_interleave(heads[0] // heads[1], 1)
            for one in part
        )
        tokens = query.shape[2]
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        sees = (distance >= 0) & (distance < (window or tokens))
        scores = (query @ key.transpose(2, 3) * size**-0.5).masked_fill(~sees, -torch.inf)
        outs.append((scores.softmax(-1) @ value).transpose(1, 2))
    expected = torch.cat(outs, 1)
    (expected * weights).sum().backward()

    ours = [one.to(device, dtype).requires_grad_() for one in drawn]
    if device.type == "cuda":
        assert flash.fits(ours[0])
    found, _ = packed_attention(
        torch.nn.Module(),
        *ours,
        None,
        scaling=size**-0.5,
        sliding_window=window,
        borders=Borders.of(LENGTHS, device),
    )
    (found * weights.to(device, dtype)).sum().backward()
    bound = ATTENTION if device.type == "cuda" else 1e-4
    torch.testing.assert_close(found.double().cpu(), expected, atol=bound, rtol=bound)
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        off = (mine.grad.double().cpu() - theirs.grad).norm() / theirs.grad.norm()
        assert off < bound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_logprobs_and_gradients_are_those_of_padded_rows(device, dtype, figure):
    model = model_on(device, dtype)
    minibatch = varied(24, 100, SMALL["vocab_size"]).whole()
    (padded, padded_gradient), (packed, packed_gradient) = (
        scored(model, minibatch, packed) for packed in (False, True)
    )
    off = float((packed - padded).abs().mean())
    turned = float((packed_gradient - padded_gradient).norm() / padded_gradient.norm())
    figure(f"packed to padded log-probs, {dtype}", off, "nats")
    figure(f"packed to padded gradient, {dtype}", turned, "relative")
    assert off <= BOUNDS[dtype][0] and turned <= BOUNDS[dtype][1]


def test_trees_of_groups_have_the_loss_and_gradient_of_packed_rows(device, figure):
    """What members share is computed once: by the flash kernel on a GPU, which is timed."""
    dtype, shape = "float32", dict[str, Any]()
    if device.type == "cuda":
        dtype, shape = "bfloat16", {"hidden_size": 1024, "num_hidden_layers": 8}
    model = model_on(device, dtype, **shape)
    row_checks.check_prefix_trees(model, gpu=device.type == "cuda")
    row_checks.check_tree_attention(model, device)
    batch, found = bench_prefix_trees.groups(SMALL["vocab_size"]), {}
    for layout in bench_prefix_trees.LAYOUTS * 2:  # the first round warms up
        model.zero_grad()
        start = time.monotonic()
        _, loss, tokens = bench_prefix_trees.passed(model, batch, layout)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - start
        gradient = torch.cat([one.grad.flatten().float() for one in model.parameters()])
        found[layout] = loss, gradient, tokens, seconds
    (packed, expected, all_tokens, slow), (tree, gradient, tokens, fast) = found.values()
    turned = float((gradient - expected).norm() / expected.norm())
    figure(f"tree to packed gradient, {dtype}", turned, "relative")
    figure("tree: tokens of those of packed rows", tokens / all_tokens, "")
    figure("tree to packed rows", slow / fast, "times as fast")
    logprob, gradients = BOUNDS[dtype]
    assert abs(tree - packed) <= logprob and turned <= gradients and tokens < all_tokens / 2


@pytest.mark.gpu
def test_packed_rows_are_faster_than_unsorted_padding(figure):
    scale: Scale = bench_packing.GPU
    found = bench_packing.compare(scale, torch.device("cuda"))
    real = found["packed"][1]
    for way, (seconds, tokens) in found.items():
        figure(f"{way} rows: real tokens of all", real / tokens, "")
        figure(f"{way} rows: forward and backward", real / seconds, "real tokens/s")
    faster = found["unsorted"][0] / found["packed"][0]
    figure("packed to unsorted rows", faster, "times as fast")
    assert faster >= bench_packing.REQUIRED


@pytest.mark.gpu
def test_memory_of_logprobs_depends_on_neither_tokens_nor_vocabulary(figure):
    device, needed = torch.device("cuda"), []
    for vocabulary in (65536, 151936):
        model = model_on(device, "bfloat16", vocab_size=vocabulary)
        weight = policy.split_model(model)[1].weight
        for tokens in (2048, 16384):
            tokens_BT = torch.zeros(1, tokens + 1, dtype=torch.long, device=device)
            hidden = torch.randn(1, tokens + 1, 64, device=device, dtype=weight.dtype)
            hidden.requires_grad_()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found = policy.token_logprobs(
                model,
                tokens_BT,
                torch.ones_like(tokens_BT),
                hidden_BTD=hidden,
                with_entropy=True,
            )
            torch.stack([part.sum() for part in found]).sum().backward()
            model.zero_grad()
            rose = torch.cuda.max_memory_allocated() - before
            figure(f"log-probs, {vocabulary} x {tokens}", rose / 2**20, "MiB")
            needed.append(rose - 2 * weight.nbytes - 4 * hidden.nbytes)
    assert max(needed) <= 8 * 4 * LOGITS[True]


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_measured_budget_fits_the_memory_that_was_free(checkpointing, figure):
    """A pass as large as the budget allows succeeds, and needs most of what it was given."""
    device = torch.device("cuda")
    model = model_on(device, "bfloat16", hidden_size=512, num_hidden_layers=8, vocab_size=32768)
    if checkpointing:
        layers.checkpoint_layers(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def pass_(tokens: int) -> None:
        tokens_1T = torch.zeros(1, tokens, dtype=torch.long, device=device)
        lengths = [1024] * (tokens // 1024) + [tokens % 1024] * (tokens % 1024 > 0)
        found = policy.token_logprobs(
            model,
            tokens_1T,
            torch.ones_like(tokens_1T),
            borders=Borders.of(lengths, device),
            with_entropy=True,
        )
        torch.stack([part.sum() for part in found]).sum().backward()

    free, total = torch.cuda.mem_get_info()
    taken = torch.empty(max(0, free - (8 << 30)), dtype=torch.uint8, device=device)  # leaves 8 GiB
    try:
        tokens = token_budget.measured(pass_, [optimizer], alone("cuda"), 1024)
        torch.cuda.reset_peak_memory_stats()
        pass_(tokens)
        used = torch.cuda.max_memory_allocated() - taken.nbytes
    finally:
        del taken
    figure(f"measured budget of 8 GiB, recomputed {checkpointing}", tokens, "tokens")
    assert 0.5 * (8 << 30) < used < 8 << 30 < total


def test_the_flash_kernel_is_refused_what_it_cannot_take(device):
    fits = device.type == "cuda"
    assert flash.fits(torch.zeros(1, 2, 3, 64, device=device, dtype=torch.bfloat16)) == fits
    assert not flash.fits(torch.zeros(1, 2, 3, 64, device=device))
    for size in (12, flash.HEAD + 8):
        odd = torch.zeros(1, 2, 3, size, device=device, dtype=torch.bfloat16)
        assert not flash.fits(odd)
