"""Products in bfloat16 on a CPU: engine and learner round alike, weights stay float32."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from actors.engines.engine import Request
from actors.engines.torch_engine import TorchEngine
from evolver_async.config import Config, StageConfig
from evolver_async.config.load import dump, load_written
from evolver_async.model import lora, policy, precision
from evolver_async.model.cpu.products import (
    SHORT,
    ShortLinear,
    ShortProduct,
    is_short,
    rounded,
    shorten,
)
from evolver_async.model.rows.borders import Borders
from evolver_async.schema import WeightId
from learner.optimize.adamw import make_adamw, take_back, with_gradient
from learner.tools import prepare
from tests.support.small_models import SHAPE, TOKENIZER

HEADS = {**SHAPE, "head_dim": 8, "max_position_embeddings": 64}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama_biases": LlamaConfig(**HEADS, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**HEADS, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(**HEADS, sliding_window=64),
}
PROMPTS = (12, 7, 3)  # tokens


def saved(name: str, directory: Path) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for weight in model.parameters():  # biases and norms, too
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return str(directory)


def logprobs(model: torch.nn.Module, tokens_1T: Tensor, *, packed: bool) -> Tensor:
    borders = Borders.of([tokens_1T.shape[1]], tokens_1T.device) if packed else None
    found, _ = policy.token_logprobs(model, tokens_1T, torch.ones_like(tokens_1T), borders=borders)
    return found[0]


async def sampled(model: torch.nn.Module) -> list[tuple[list[int], list[int], list[float]]]:
    """Return prompts, sampled tokens and their log-probs, by an engine that copies its weights."""
    assert isinstance(model, policy.PreTrainedModel)
    engine = TorchEngine(
        model,
        TOKENIZER,
        weights=WeightId(lineage=1, step=0),
        slots=4,
        max_length=48,
        prefill_tokens=64,
        in_flight="keep",
    )
    requests = [
        Request(
            tokens=[token % model.config.vocab_size for token in range(5, 5 + length)],
            max_tokens=24,
            temperature=1.0,
            session=str(length),
            seed=length,
        )
        for length in PROMPTS
    ]
    try:
        outs = await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()
    return [(one.tokens, out.tokens, out.logprobs) for one, out in zip(requests, outs, strict=True)]


def gap(model: torch.nn.Module, drawn: list[tuple[list[int], list[int], list[float]]]) -> float:
    """Return the mean distance of a model's log-probs, padded and packed, from the engine's."""
    parts = []
    for prompt, tokens, mu in drawn:
        tokens_1T = torch.tensor([prompt + tokens])
        for packed in (False, True):
            with torch.no_grad():
                theta = logprobs(model, tokens_1T, packed=packed)[len(prompt) :]
            parts.append((theta - torch.tensor(mu)).abs())
    return float(torch.cat(parts).mean())


@pytest.mark.parametrize("shape", [(20,), (4, 5)], ids=str)
def test_a_product_rounds_its_factors_and_gives_float32(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(*shape, 24, requires_grad=True), torch.randn(40, 24, requires_grad=True)
    bias = torch.randn(40, requires_grad=True)
    leaves = x, weight, bias
    found = ShortProduct.apply(x, weight, rounded(weight), bias)
    assert isinstance(found, Tensor) and found.dtype == torch.float32
    assert torch.equal(found, F.linear(x.to(SHORT), weight.to(SHORT)).float() + bias)
    slope = torch.randn_like(found)
    ours = torch.autograd.grad((found * slope).sum(), leaves)
    theirs = torch.autograd.grad((F.linear(*leaves) * slope).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.float32
        assert float((one - other).norm() / other.norm()) < 0.02


@pytest.mark.parametrize("name", CONFIGS)
def test_engine_and_learner_round_alike(name: str, tmp_path: Path) -> None:
    """Through the fused forward and through the module, over padded and over packed rows."""
    path = saved(name, tmp_path)
    model = precision.load_policy(path, dtype="bfloat16", device="cpu")
    exact = precision.load_policy(path, dtype="float32", device="cpu")
    assert is_short(model) and not is_short(exact)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert type(model.get_output_embeddings()) is torch.nn.Linear, "logits stay float32"
    drawn = asyncio.run(sampled(model))
    assert 0 < gap(model, drawn) < 0.5 * gap(exact, drawn)
    assert gap(exact, drawn) < 0.1


def test_adapters_train_what_engines_merge(tmp_path: Path) -> None:
    path = saved("qwen3", tmp_path)
    model = precision.load_policy(path, dtype="bfloat16", device="cpu")
    base = policy.state_tensors(model)
    lora.inject(model, rank=2, alpha=4.0, targets=[], seed=0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(lora.UP):
                weight.normal_(0, 0.1)
    whole = lora.merge(base, policy.state_tensors(model), 2.0)
    engine = precision.load_policy(path, dtype="bfloat16", device="cpu")
    policy.load_state(engine, whole)
    plain = precision.load_policy(path, dtype="float32", device="cpu")
    policy.load_state(plain, whole)
    drawn = asyncio.run(sampled(engine))
    assert gap(model, drawn) < 0.5 * gap(plain, drawn)
    exact = policy.load_model(path, dtype="float32", device="cpu")
    lora.inject(exact, rank=2, alpha=4.0, targets=[], seed=0)
    policy.load_state(exact, policy.state_tensors(model))
    tokens_1T = torch.arange(20)[None]
    grads = [
        torch.autograd.grad(
            logprobs(one, tokens_1T, packed=True).sum(),
            [weight for weight in one.parameters() if weight.requires_grad],
        )
        for one in (model, exact)
    ]
    ours, theirs = (torch.cat([grad.flatten() for grad in some]) for some in grads)
    assert float(F.cosine_similarity(ours, theirs, 0)) > 0.99


def test_every_change_of_a_weight_reaches_its_rounded_copy(tmp_path: Path) -> None:
    """torch's fused AdamW changes weights without counting it."""
    model = precision.load_policy(saved("llama_biases", tmp_path), dtype="bfloat16", device="cpu")
    linears = [one for one in model.modules() if isinstance(one, ShortLinear)]
    optimizer = make_adamw(model.parameters(), betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    tokens_1T = torch.arange(20)[None]

    def follows() -> bool:
        return all(torch.equal(rounded(one.weight), one.weight.to(SHORT)) for one in linears)

    assert follows()
    before = [rounded(one.weight).clone() for one in linears]
    (-logprobs(model, tokens_1T, packed=True).sum()).backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    moved = with_gradient(optimizer)
    optimizer.step()
    assert follows()
    assert not any(
        torch.equal(rounded(one.weight), old) for one, old in zip(linears, before, strict=True)
    )
    take_back(optimizer, moved, 0.01)
    assert follows()
    policy.load_state(model, {k: 2 * v for k, v in policy.state_tensors(model).items()})
    assert follows()


def test_gradients_are_those_of_float32_up_to_rounding(tmp_path: Path) -> None:
    path = saved("gemma3", tmp_path)
    tokens_1T = torch.arange(20)[None]
    found = []
    for dtype in ("bfloat16", "float32"):
        model = precision.load_policy(path, dtype=dtype, device="cpu")
        (-logprobs(model, tokens_1T, packed=False).sum()).backward()
        found.append({name: one.grad for name, one in model.named_parameters()})
    for name, ours in found[0].items():
        theirs = found[1][name]
        assert ours is not None and theirs is not None and ours.dtype == torch.float32
        assert float(F.cosine_similarity(ours.flatten(), theirs.flatten(), 0)) > 0.98, name


@pytest.mark.parametrize(
    ("found", "chosen"),
    [((1.6, 6.0), "bfloat16"), ((1.4, 6.0), "float32"), ((2.0, 1.2), "float32")],
)
def test_auto_is_decided_once_by_the_speed_of_the_models_products(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: tuple[float, float], chosen: str
) -> None:
    monkeypatch.setattr(prepare, "gains", lambda model: found)
    monkeypatch.setattr(prepare, "on_gpu", lambda device: "cuda" in device)
    config = Config(stages=[StageConfig(steps=1)])
    config.policy.path = saved("qwen3", tmp_path / "model")
    dump(config, tmp_path / "config.yaml")
    assert prepare._decide(config, tmp_path, False).policy.dtype == chosen
    assert load_written(tmp_path, checked=False).policy.dtype == chosen


@pytest.mark.parametrize(
    ("changes", "gpus", "chosen"),
    [
        ({}, ["auto"], "bfloat16"),
        ({"learner": "cpu"}, ["auto"], "float32"),
        ({"kind": "ray"}, ["auto"], "float32"),
        ({"kind": "ray", "learner": "cuda", "engine": "cuda"}, [], "bfloat16"),
        ({"engine_kind": "vllm"}, [], "float32"),
        ({"ranks": 2}, [], "float32"),
        ({"path": ""}, ["auto"], "float32"),
    ],
    ids=["GPUs", "a CPU and a GPU", "unknown nodes", "named GPUs", "vLLM", "ranks", "preset"],
)
def test_auto_is_float32_unless_both_sides_are_known_to_round_alike(
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    gpus: list[str],
    chosen: str,
) -> None:
    monkeypatch.setattr(prepare, "gains", lambda model: (1.0, 1.0))
    monkeypatch.setattr(policy, "load_model", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(prepare, "on_gpu", lambda device: device in gpus or "cuda" in device)
    config = Config()
    config.policy.path = changes.get("path", "pretrained")
    config.learner.device = changes.get("learner", "auto")
    config.engine.device = changes.get("engine", "auto")
    config.engine.kind = changes.get("engine_kind", "torch")  # pyright: ignore
    config.launch.kind = changes.get("kind", "local")  # pyright: ignore
    config.learner.ranks = int(changes.get("ranks", 1))
    assert prepare._precision(config, not config.policy.path)[0] == chosen


@pytest.mark.parametrize("least", [0.0, math.inf])
def test_the_probe_ends_where_decoding_does_not_gain_and_leaves_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: float
) -> None:
    monkeypatch.setattr(precision, "FASTER", least)
    model = policy.load_model(saved("qwen3", tmp_path), dtype="float32", device="cpu")
    threads = torch.get_num_threads()
    for _ in range(2):
        decoding, training = precision.gains(model)
        assert decoding > 0 and (training > 0) == (least == 0)
        assert torch.get_num_threads() == threads
        shorten(model)
