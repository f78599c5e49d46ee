"""Adapters on a GPU: merging them gives the policy that was trained; what training them costs."""

import time

import pytest
import torch
from figures import Figure
from gpu_models import BOUNDS, TOKENIZER, model_on

from evolver_async.model import lora, policy
from learner.optimize.adamw import make_adamw, update

RANK, ALPHA = 16, 32.0


def tokens_on(device: torch.device, rows: int, length: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(0)
    return torch.randint(len(TOKENIZER), (rows, length), generator=draws).to(device)


def logprobs(model: torch.nn.Module, tokens_BT: torch.Tensor) -> torch.Tensor:
    found_BT, _ = policy.token_logprobs(model, tokens_BT, torch.ones_like(tokens_BT))
    return found_BT[:, 1:]


@torch.no_grad()
def train_much(model: torch.nn.Module) -> None:
    """Adapters that change what the model says."""
    draws = torch.Generator().manual_seed(1)
    for name, tensor in policy.state_tensors(model).items():
        if name.endswith(lora.UP):
            tensor.copy_(0.01 * torch.randn(tensor.shape, generator=draws))


@pytest.mark.parametrize("dtype", BOUNDS)
@torch.no_grad()
def test_merged_weights_say_what_the_adapted_model_says(
    dtype: str, device: torch.device, figure: Figure
) -> None:
    model = model_on(device, dtype)
    tokens_BT = tokens_on(device, 4, 96)
    before_BT = logprobs(model, tokens_BT)
    host = {name: tensor.cpu() for name, tensor in policy.state_tensors(model).items()}
    lora.inject(model, rank=RANK, alpha=ALPHA, targets=[], seed=0)
    assert torch.equal(logprobs(model, tokens_BT), before_BT)
    train_much(model)
    apart_BT = logprobs(model, tokens_BT)
    start = time.perf_counter()
    merged = lora.merge(host, policy.state_tensors(model), ALPHA / RANK)
    figure("lora merge in host memory", time.perf_counter() - start, "s")
    whole = model_on(device, dtype)
    policy.load_state(whole, merged)
    error_BT = (logprobs(whole, tokens_BT) - apart_BT).abs()
    mean, tail = float(error_BT.mean()), float(error_BT.flatten().quantile(0.999))
    figure(f"lora merged |Δlogp| mean, {dtype}", mean, "nats")
    figure(f"lora merged |Δlogp| 99.9 %, {dtype}", tail, "nats")
    most, most_tail, _ = BOUNDS[dtype]  # in bfloat16 a merged weight is rounded once more
    moved = float((apart_BT - before_BT).abs().mean())
    assert mean <= most and tail <= most_tail and moved > 4 * mean


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
def test_a_step_keeps_moments_of_what_is_trained_alone(
    adapted: bool, device: torch.device, figure: Figure
) -> None:
    model = model_on(device, "float32")
    if adapted:
        lora.inject(model, rank=RANK, alpha=ALPHA, targets=[], seed=0)
    optimizer = make_adamw(model.parameters(), betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    tokens_BT = tokens_on(device, 2, 128)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        loss = -logprobs(model, tokens_BT).mean()
        loss.backward()
        (done,) = update([(optimizer, 1e-4)], loss=float(loss.detach()), grad_clip=1.0)
        assert done.applied
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    moments = [slots["exp_avg"].numel() for slots in optimizer.state.values()]
    assert sum(moments) == trained
    assert adapted == (trained < 0.5 * sum(one.numel() for one in model.parameters()))
    figure("lora trained parameters" if adapted else "trained parameters", trained, "")
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        figure("lora step peak memory" if adapted else "whole step peak memory", peak, "GiB")
