"""Sizes of a causal language model, from its `config.json` or from the keys of the tiny preset.

Plain arithmetic for Llama, Qwen2 and Qwen3 and what is built like them; torch is not imported, so
that a start can be checked in no time.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evolver_async.config import Config

TINY_VOCABULARY = 1043  # tokens of the preset's tokenizer
BIASED = ("qwen2",)  # kinds with biases of queries, keys and values
NORMED = ("qwen3",)  # kinds with norms of queries and keys


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder-only model; `biased`, `normed`: its attention has biases, norms.

    `stored`: the type of its files, "" if that is unknown.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool = False
    biased: bool = False
    normed: bool = False
    stored: str = ""

    @property
    def queries(self) -> int:
        """Size of all heads' queries of one token; that of the attention's output as well."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Size of all heads' keys of one token; that of its values as well."""
        return self.kv_heads * self.head_size

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        projections = self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.inner)
        biases = self.biased * (self.queries + 2 * self.keys)
        return projections + biases + 2 * self.hidden + self.normed * 2 * self.head_size

    @property
    def embedding(self) -> int:
        """Parameters of the table of tokens; the output projection has as many."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        tables = self.embedding * (1 if self.tied else 2)
        return tables + self.layers * self.layer + self.hidden

    @property
    def decoder(self) -> int:
        """Parameters without the output projection, as a separate critic has them."""
        return self.embedding + self.layers * self.layer + self.hidden


def shape_of(config: Config) -> DecoderShape | None:
    """Return the shape of a recipe's policy; None if its directory has no readable shape."""
    policy = config.policy
    if not policy.path:
        size = policy.hidden_size // policy.heads
        return DecoderShape(
            *(policy.layers, policy.hidden_size, policy.intermediate_size),
            *(policy.heads, policy.heads, size, TINY_VOCABULARY),
            normed=True,
        )
    try:
        return _read(json.loads((Path(policy.path) / "config.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(found: dict[str, Any]) -> DecoderShape:
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    kind = found["model_type"]
    return DecoderShape(
        layers=found["num_hidden_layers"],
        hidden=hidden,
        inner=found["intermediate_size"],
        heads=heads,
        kv_heads=found.get("num_key_value_heads") or heads,
        head_size=found.get("head_dim") or hidden // heads,
        vocabulary=found["vocab_size"],
        tied=found.get("tie_word_embeddings", False),
        biased=kind in BIASED or bool(found.get("attention_bias")),
        normed=kind in NORMED,
        stored=found.get("dtype") or found.get("torch_dtype") or "",
    )
