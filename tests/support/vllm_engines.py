"""Models on disk and vLLM engines for them, whose processes are shared by many tests."""

from pathlib import Path

import torch
from engine_conformance import RUNNER
from torch import Tensor
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

from actors.engines.vllm_core import VllmCore
from actors.engines.vllm_engine import VllmEngine
from actors.engines.vllm_start import Settings
from actors.weights.source import VersionSource
from evolver_async.model.policy import state_tensors
from evolver_async.model.tiny import make_tokenizer
from evolver_async.schema import WeightId

LENGTH, SLOTS = 256, 8
TOKENIZER = make_tokenizer(LENGTH)
SHAPE = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,  # the least that vLLM's CPU attention takes
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.1,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2_tied_grouped": Qwen2Config(**SHAPE, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2),
    "llama": LlamaConfig(**SHAPE, num_key_value_heads=2),
    "gemma3": Gemma3TextConfig(**SHAPE, num_key_value_heads=1),
}


def make_model(name: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa").to(dtype)


def save(model, directory: Path) -> Path:
    model.save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


def settings(path: Path, **changes) -> Settings:
    numbers = {
        "path": str(path),
        "dtype": "float32",
        "directory": "/dev/shm",
        "slots": SLOTS,
        "max_length": LENGTH,
        "prefill_tokens": 64,
    }
    return Settings(**numbers | changes)


def engine_of(core: VllmCore, **changes) -> "Lent":
    numbers = {"slots": SLOTS, "max_length": LENGTH, "in_flight": "keep"} | changes
    return Lent(core, vocabulary=core.vocabulary, **numbers)


class Lent(VllmEngine):
    """An engine on processes that outlive it."""

    async def update(self, weights: WeightId, tensors: dict[str, Tensor]) -> None:
        """Publish tensors to vLLM's workers, as a learner would, and adopt them."""
        await publish(self, self.core, weights, tensors)

    async def close(self) -> None:
        assert not self._sessions, "something still runs"


async def publish(
    source: VersionSource, core: VllmCore, weights: WeightId, tensors: dict[str, Tensor]
) -> None:
    assert core.publisher is not None
    core.publisher.publish(weights, tensors)
    await source.stage(weights)
    await source.adopt(weights)


def lend(core: VllmCore):
    """A factory as `engine_conformance` wants it; the weights come by an update."""

    def factory(model, tokenizer, *, weights: WeightId, prefill_tokens: int, **numbers):
        core.keeps_kv = numbers["in_flight"] == "keep_kv"
        RUNNER.run(publish(engine_of(core), core, weights, state_tensors(model)))
        return engine_of(core, **numbers)

    return factory
