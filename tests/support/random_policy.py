"""A random policy on a real engine, whose agents talk to the endpoint."""

from typing import Any

import torch
from scripted_agents import NEW, Player, Ran, run
from transformers import Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from actors.engines.torch_engine import TorchEngine
from actors.formats.chat import Chat
from evolver_async.model.tiny import make_tokenizer

LENGTH = 1024
TOKENIZER = make_tokenizer(LENGTH)


def model_of() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    spread = {"max_position_embeddings": LENGTH, "initializer_range": 0.1}
    config = Qwen3Config(vocab_size=len(TOKENIZER) + 3, **shape, **heads, **spread)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def engine_of(model: Any) -> TorchEngine:
    limits = {"slots": 4, "max_length": LENGTH, "prefill_tokens": 512}
    return TorchEngine(model, TOKENIZER, weights=NEW, in_flight="keep", **limits)


def play(player: Player, model: Any, **changes: Any) -> Ran:
    usual = {"chat": Chat(TOKENIZER), "max_length": LENGTH, "max_tokens": 100}
    return run(player, engine_of(model), **(usual | changes))
