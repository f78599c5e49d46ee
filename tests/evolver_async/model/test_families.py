"""Families of models: what learner and torch engine do with each, as the table of the docs says."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto import AutoModelForCausalLM

from actors.engines import model_check
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.config.shape import shape_of
from evolver_async.model import lora, policy, row_checks
from evolver_async.model.tiny import make_tokenizer
from evolver_async.model.tokenizer import ModelError

CPU = torch.device("cpu")
TOKENIZER = make_tokenizer(64)
LENGTH = 64
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
COMPRESSED: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16},
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16},
}
WINDOW: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}

NO = "–"


class Row(NamedTuple):
    """A row of the table: the layout of rows, the torch engine, the linears that get adapters."""

    layout: str
    engine: str
    adapters: str


DENSE = Row("packed, trees", "yes", "all")
WINDOWED = Row("packed", NO, "all")
HYBRID = Row("padded", NO, "all")
MIXTURE = Row("packed, trees", "yes", "attention")
FAMILIES: dict[str, tuple[Callable[..., PretrainedConfig], Row]] = {
    "Llama": (transformers.LlamaConfig, DENSE),
    "Qwen2, Qwen2.5": (transformers.Qwen2Config, DENSE),
    "Qwen3": (transformers.Qwen3Config, DENSE),
    "Mistral": (partial(transformers.MistralConfig, sliding_window=None), DENSE),
    "Mistral with a window": (partial(transformers.MistralConfig, sliding_window=8), WINDOWED),
    "Phi 3, Phi 4": (transformers.Phi3Config, DENSE),
    "GLM 4": (transformers.Glm4Config, DENSE),
    "Mixtral": (partial(transformers.MixtralConfig, **LOCAL, sliding_window=None), MIXTURE),
    "Qwen3-MoE": (partial(transformers.Qwen3MoeConfig, **EXPERTS), MIXTURE),
    "DeepSeek V3": (
        partial(transformers.DeepseekV3Config, **COMPRESSED),
        Row("packed, trees", NO, "all but experts"),
    ),
    "Gemma 2": (transformers.Gemma2Config, Row(NO, NO, NO)),
    "Gemma 3": (partial(transformers.Gemma3TextConfig, **WINDOW), WINDOWED),
    "Qwen3-Next": (
        partial(transformers.Qwen3NextConfig, **LINEAR, **EXPERTS),
        Row("padded", NO, "all but experts"),
    ),
    "Qwen3.5": (partial(transformers.Qwen3_5TextConfig, **LINEAR), HYBRID),
    "gpt-oss": (partial(transformers.GptOssConfig, **LOCAL, sliding_window=8), Row(NO, NO, NO)),
}
PAGE = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text().splitlines()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_does_what_the_table_says(name: str, tmp_path: Path) -> None:
    make, row = FAMILIES[name]
    torch.manual_seed(0)
    sizes = {
        key: size for key, size in SIZES.items() if "DeepSeek" not in name or key != "head_dim"
    }
    AutoModelForCausalLM.from_config(make(**sizes)).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    assert found(tmp_path) == row
    assert any(line.startswith(f"| {name} | {' | '.join(row)} |") for line in PAGE)


def found(path: Path) -> Row:
    """Try a model as the start of a run does."""
    try:
        model = policy.load_model(path, dtype="float32", device="cpu")
    except ModelError:
        return Row(NO, NO, NO)
    engine = "yes"
    config = load(None, [f"policy.path={path}", f"policy.max_length={LENGTH}", "stages.0.steps=1"])
    try:
        model_check.check(config, model, TOKENIZER)
    except ConfigError as error:
        assert str(error).startswith("engine.kind: ")
        engine = NO
    return Row(layout(model), engine, adapters(model))


def layout(model: transformers.PreTrainedModel) -> str:
    try:
        row_checks.check_packing(model)
    except ModelError as error:
        assert str(error).startswith("learner.packing: must be false")
        same_alone_as_padded(model)
        return "padded"
    try:
        row_checks.check_prefix_trees(model, gpu=False)
    except ModelError:
        return "packed"
    return "packed, trees"


@torch.no_grad()
def same_alone_as_padded(model: transformers.PreTrainedModel) -> None:
    """Padding on the right changes no token before it."""
    row_1T = torch.arange(9)[None]
    alone_1TD = policy.hidden_states(model, row_1T)
    padded_1TD = policy.hidden_states(model, torch.nn.functional.pad(row_1T, (0, 4)))
    assert torch.allclose(padded_1TD[:, :9], alone_1TD, atol=1e-4)


def adapters(model: transformers.PreTrainedModel) -> str:
    """Which parts of the decoder get adapters; each of them gets a gradient."""
    experts = [one for one, _ in model.named_parameters() if ".experts." in one]
    names = lora.inject(model, rank=2, alpha=2.0, targets=[], seed=0)
    policy.hidden_states(model, torch.arange(9)[None]).sum().backward()
    trained = [one for one in model.parameters() if one.requires_grad]
    assert trained and all(one.grad is not None for one in trained)
    if not experts:
        return "all"
    return "all but experts" if any("mlp" in one for one in names) else "attention"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_a_state_are_refused_by_their_kind(dtype: torch.dtype) -> None:
    """A trained state may leak into the next row by less than a short type rounds."""
    config = transformers.Qwen3_5TextConfig(**SIZES, **LINEAR)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for one in model.parameters():
        one.data.zero_()  # nothing leaks
    with pytest.raises(ModelError, match=r"learner\.packing.* linear_attention"):
        row_checks.check_packing(model)


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 28}


def test_a_model_that_takes_images_is_refused(tmp_path: Path) -> None:
    """It has no vocabulary of its own, at which the first step would fail."""
    vision = VISION | {"num_attention_heads": 2, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=SIZES | WINDOW, vision_config=vision)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="text alone"):
        policy.load_model(tmp_path, dtype="float32", device="cpu")


def test_vllm_is_refused_where_the_text_of_a_larger_model_is_trained(tmp_path: Path) -> None:
    text = transformers.Qwen3_5TextConfig(**SIZES, **LINEAR)
    transformers.Qwen3_5Config(text_config=text.to_dict()).save_pretrained(tmp_path)
    config = load(None, [f"policy.path={tmp_path}", "engine.kind=vllm", "stages.0.steps=1"])
    model = AutoModelForCausalLM.from_config(text)
    with pytest.raises(ConfigError, match=r"^engine\.kind: vllm"):
        model_check.check(config, model, TOKENIZER)
    text.save_pretrained(tmp_path)
    model_check.check(config, model, TOKENIZER)


def test_a_shape_of_another_build_is_unknown(tmp_path: Path) -> None:
    sizes = {key: size for key, size in SIZES.items() if key != "head_dim"}
    transformers.DeepseekV3Config(**sizes, **COMPRESSED).save_pretrained(tmp_path)
    policy_config = load(None, [f"policy.path={tmp_path}", "stages.0.steps=1"])
    assert shape_of(policy_config) is None
