"""The torch engine keeps what `engine_conformance` asks, on several architectures, and its own."""

import pytest
import torch
from engine_conformance import CONFORMANCE, V0, Setting, setting
from transformers import (
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

from actors.engines.decoding.fused import FusedDecoder
from actors.engines.decoding.sampling import sample
from actors.engines.torch_engine import TorchEngine
from evolver_async.model.tiny import make_tokenizer

TOKENIZER = make_tokenizer(256)
SHAPE = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=4, head_dim=8),
    "qwen2_tied_grouped": Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "llama_grouped": LlamaConfig(**SHAPE, num_key_value_heads=2),
    "neox": GPTNeoXConfig(**SHAPE),  # no lean forward: the module's own
}


def settings(name: str) -> Setting:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa").eval()
    return setting(TorchEngine, model, TOKENIZER)


@pytest.mark.parametrize("name", ["qwen3", "neox"])
@pytest.mark.parametrize("promise", CONFORMANCE, ids=lambda promise: promise.__name__)
def test_conformance(promise, name):
    promise(settings(name))


@pytest.mark.parametrize("name", ["qwen2_tied_grouped", "llama_grouped"])
@pytest.mark.parametrize(
    "promise",
    [one for one in CONFORMANCE if "turns" in one.__name__ or "keeps" in one.__name__],
    ids=lambda promise: promise.__name__,
)
def test_conformance_of_other_architectures(promise, name):
    promise(settings(name))


def test_lean_forward_is_used_where_it_fits():
    assert [name for name in CONFIGS if FusedDecoder.fits(settings(name).model)] == [
        "qwen3",
        "qwen2_tied_grouped",
        "llama_grouped",
    ]


def test_models_that_do_not_see_the_whole_context_are_refused():
    sizes = SHAPE | {"num_key_value_heads": 2, "sliding_window": 16}
    model = AutoModelForCausalLM.from_config(MistralConfig(**sizes))
    numbers = {"weights": V0, "slots": 2, "prefill_tokens": 64, "in_flight": "keep"}
    with pytest.raises(ValueError, match="sliding window 16"):
        TorchEngine(model, TOKENIZER, max_length=64, **numbers)
    with pytest.raises(ValueError, match="256 positions"):
        TorchEngine(settings("qwen3").model, TOKENIZER, max_length=512, **numbers)


def test_draws_follow_the_distribution():
    logits = torch.tensor([2.0, 0.0, -torch.inf, 1.0])
    uniforms = ((torch.arange(4000) + 0.5) / 4000).tolist()
    tokens, logprobs = sample(logits.repeat(4000, 1), [0.5] * 4000, uniforms)
    expected = (logits / 0.5).log_softmax(-1)
    assert torch.allclose(tokens.bincount(minlength=4) / 4000, expected.exp(), atol=1e-3)
    assert torch.equal(logprobs, expected[tokens])
    last, _ = sample(logits[None], [1.0], [1 - 2**-53])
    assert last.item() == 3
