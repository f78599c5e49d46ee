"""Models and comparisons of the parity tests on a GPU."""

import copy

import torch
from engine_conformance import request
from transformers import PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from actors.engines.engine import Generation, Request
from evolver_async.model.policy import token_logprobs
from evolver_async.model.tiny import make_tokenizer

TOKENIZER = make_tokenizer(512)


SMALL = Qwen3Config(
    vocab_size=len(TOKENIZER),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,  # the least that vLLM's CPU attention takes
    max_position_embeddings=512,
    tie_word_embeddings=True,
)


HALF_BILLION = Qwen2Config(  # the shape of Qwen2.5-0.5B
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)


SHARPNESS = 4.0  # of the last norm: a random model would otherwise find all tokens equally likely


PROMPT, NEW, REQUESTS = 48, 48, 16


# Mean and 99.9 % quantile of |engine - learner|, and how far the mean importance weight is from 1.
# In bfloat16 the half-billion shape has 0.041, 0.18 and 0.001 on a CPU.
BOUNDS = {"float32": (1e-4, 1e-3, 1e-4), "bfloat16": (0.06, 0.35, 0.02)}


def model_on(device: torch.device, dtype: str) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = HALF_BILLION if device.type == "cuda" else SMALL
    with device:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(shape), attn_implementation="sdpa", dtype=getattr(torch, dtype)
        )
    with torch.no_grad():
        model.model.norm.weight.mul_(SHARPNESS)
    return model.eval()


def requests(name: str = "") -> list[Request]:
    """Prompts of several lengths and several temperatures, in sessions of this name."""
    generator = torch.Generator().manual_seed(1)
    many = []
    for index in range(REQUESTS):
        prompt = torch.randint(0, len(TOKENIZER), (PROMPT + index,), generator=generator).tolist()
        heat = (0.7, 1.0, 1.0, 1.3)[index % 4]
        many.append(request(prompt, f"{name}{index}", max_tokens=NEW, temperature=heat, seed=index))
    return many


@torch.no_grad()
def differences(
    model: PreTrainedModel, asked: list[Request], given: list[Generation]
) -> torch.Tensor:
    """Engine minus learner, of every generated token."""
    found = []
    for one, out in zip(asked, given, strict=True):
        tokens_BT = torch.tensor([one.tokens + out.tokens], device=model.device)
        logprobs_BT, _ = token_logprobs(
            model, tokens_BT, torch.ones_like(tokens_BT), one.temperature
        )
        found.append(torch.tensor(out.logprobs) - logprobs_BT[0, -len(out.tokens) :].cpu())
    return torch.cat(found)


def assert_close(delta_N: torch.Tensor, dtype: str, figure, what: str) -> None:
    mean = float(delta_N.abs().mean())
    tail = float(delta_N.abs().quantile(0.999))
    weight = float((-delta_N).exp().mean())
    figure(f"{what}, mean |difference|", mean, "nats")
    figure(f"{what}, 99.9 % of |difference|", tail, "nats")
    figure(f"{what}, mean importance weight", weight, "")
    bounds = BOUNDS[dtype]
    assert mean <= bounds[0] and tail <= bounds[1] and abs(weight - 1) <= bounds[2]
