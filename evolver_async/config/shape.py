"""Sizes of a causal language model: from `config.json`, from the head of a .gguf file, or from the
keys of the tiny preset.

Plain arithmetic for Llama, Qwen2 and Qwen3, what is built like them, and mixtures of experts; torch
is not imported, so that a start can be checked in no time.
"""

import mmap
import struct
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from evolver_async.config import hub
from evolver_async.config.sections import Config
from evolver_async.files import parsed

TINY_VOCABULARY = 1043  # tokens of the preset's tokenizer
BIASED = ("qwen2",)  # kinds with biases of queries, keys and values
NORMED = ("qwen3", "qwen3_moe")  # kinds with norms of queries and keys
# Names of the number of a layer's experts, in the configurations of several kinds.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Keys of models that are built otherwise: compressed keys and values, tables of tokens per layer.
UNLIKE = ("kv_lora_rank", "hidden_size_per_layer_input")
GGUF = ".gguf"
# Formats of a .gguf file's numbers by their type; texts (8) and lists (9) have a length.
SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder-only model; `biased`, `normed`: its attention has biases, norms.

    `stored`: the type of its files, "" if that is unknown. `positions`: its longest context, 0 if
    that is unknown. A layer has `experts` MLPs of size `inner`, of which a token passes `active`.
    `windowed`: some layers attend to a part of the context alone.
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
    positions: int = 0
    experts: int = 1
    active: int = 1
    windowed: bool = False

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
        router = self.experts if self.experts > 1 else 0
        mlps = 3 * self.inner * self.experts + router
        projections = self.hidden * (2 * self.queries + 2 * self.keys + mlps)
        biases = self.biased * (self.queries + 2 * self.keys)
        return projections + biases + 2 * self.hidden + self.normed * 2 * self.head_size

    @property
    def activations(self) -> int:
        """Values that one layer keeps of a token for its backward pass.

        Two norms keep input, normalised input and output; queries and keys are kept before and
        after their norm and after rotation, values once, attention's output twice (by heads and
        merged); an MLP keeps its gate before and after the activation, the other factor and the
        product.
        """
        attention = 5 * self.queries + 4 * self.keys
        return 6 * self.hidden + attention + 4 * self.inner * self.active

    @property
    def embedding(self) -> int:
        """Parameters of the table of tokens; the output projection has as many."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        tables = self.embedding * (1 if self.tied else 2)
        return tables + self.layers * self.layer + self.hidden

    @property
    def passed(self) -> int:
        """Parameters with which one token is multiplied: of a layer's experts the active ones."""
        idle = 3 * self.inner * self.hidden * (self.experts - self.active)
        return self.embedding + self.layers * (self.layer - idle)

    @property
    def decoder(self) -> int:
        """Parameters without the output projection, as a separate critic has them."""
        return self.embedding + self.layers * self.layer + self.hidden


def shape_of(config: Config) -> DecoderShape | None:
    """Return the shape of a recipe's policy; None if `policy.path` has no readable shape."""
    policy = config.policy
    if not policy.path:
        size = policy.hidden_size // policy.heads
        return DecoderShape(
            *(policy.layers, policy.hidden_size, policy.intermediate_size),
            *(policy.heads, policy.heads, size, TINY_VOCABULARY),
            normed=True,
        )
    path = Path(policy.path)
    try:
        if path.suffix == GGUF:
            return _of_gguf(path)
        if hub.is_id(policy.path):
            found = hub.config_of(policy)
        else:
            found = parsed((path / "config.json").read_text())
        return _read(found.get("text_config") or found)
    except (OSError, ValueError, KeyError, TypeError, struct.error, IndexError):
        return None


def teacher_shape(config: Config) -> DecoderShape | None:
    """Return the shape of the model of `teacher.path`; None if it is unknown, or without one."""
    if not config.teacher.path:
        return None
    policy = replace(config.policy, path=config.teacher.path, revision="")
    return shape_of(replace(config, policy=policy))


def _read(found: dict[str, Any]) -> DecoderShape:
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    if unlike := [key for key in UNLIKE if found.get(key)]:
        raise ValueError(f"{unlike[0]}: a model of another build")
    kind = found["model_type"]
    experts = next((found[name] for name in EXPERTS if found.get(name)), 1)
    return DecoderShape(
        layers=found["num_hidden_layers"],
        hidden=hidden,
        inner=(experts > 1 and found.get("moe_intermediate_size")) or found["intermediate_size"],
        heads=heads,
        kv_heads=found.get("num_key_value_heads") or heads,
        head_size=found.get("head_dim") or hidden // heads,
        vocabulary=found["vocab_size"],
        tied=found.get("tie_word_embeddings", False),
        biased=kind in BIASED or bool(found.get("attention_bias")),
        normed=kind in NORMED,
        stored=found.get("dtype") or found.get("torch_dtype") or "",
        positions=found.get("max_position_embeddings") or 0,
        experts=experts,
        active=found.get("num_experts_per_tok") or 1 if experts > 1 else 1,
        windowed=bool(found.get("sliding_window")) and found.get("use_sliding_window", True),
    )


@cache
def _of_gguf(path: Path) -> DecoderShape:
    """Read the sizes in the head of a .gguf file. It is converted to float32."""
    found, tensors = _head_of_gguf(path)
    kind = found["general.architecture"]
    heads = found[f"{kind}.attention.head_count"]
    hidden = found[f"{kind}.embedding_length"]
    experts = found.get(f"{kind}.expert_count") or 1
    inner = experts > 1 and found.get(f"{kind}.expert_feed_forward_length")
    return DecoderShape(
        layers=found[f"{kind}.block_count"],
        hidden=hidden,
        inner=inner or found[f"{kind}.feed_forward_length"],
        heads=heads,
        kv_heads=found.get(f"{kind}.attention.head_count_kv") or heads,
        head_size=found.get(f"{kind}.attention.key_length") or hidden // heads,
        vocabulary=found["tokenizer.ggml.tokens"],
        tied="output.weight" not in tensors,
        biased="blk.0.attn_q.bias" in tensors,
        normed="blk.0.attn_q_norm.weight" in tensors,
        stored="float32",
        positions=found.get(f"{kind}.context_length") or 0,
        experts=experts,
        active=found.get(f"{kind}.expert_used_count") or 1,
        windowed=bool(found.get(f"{kind}.attention.sliding_window")),
    )


def _head_of_gguf(path: Path) -> tuple[dict[str, Any], set[str]]:
    """Return the numbers and texts of a .gguf file's head, of lists the length; names of tensors.

    The package `gguf` reads the same, with an object for each of the vocabulary's words.
    ValueError, struct.error or IndexError if it is no such file.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0

        def take(kind: str) -> Any:
            nonlocal at
            (value,) = struct.unpack_from(f"<{kind}", data, at)
            at += struct.calcsize(f"<{kind}")
            return value

        def text() -> str:
            nonlocal at
            size = take("Q")
            at += size
            return data[at - size : at].decode(errors="replace")

        def value(kind: int) -> Any:
            nonlocal at
            if kind in SCALARS:
                return take(SCALARS[kind])
            if kind == 8:
                return text()
            item, count = take("I"), take("Q")
            if item in SCALARS:
                at += count * struct.calcsize(f"<{SCALARS[item]}")
            for _ in range(0 if item in SCALARS else count):
                value(item)
            return count

        if data[:4] != b"GGUF":
            raise ValueError(f"{path} is not a .gguf file")
        at = 8  # after the magic and the version
        tensors, pairs = take("Q"), take("Q")
        found = {text(): value(take("I")) for _ in range(pairs)}
        names = set()
        for _ in range(tensors):
            names.add(text())
            dimensions = take("I")
            at += dimensions * 8 + 12  # their sizes, type, offset
    return found, names
