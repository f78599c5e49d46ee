"""Bytes that a recipe's models, caches and training take: arithmetic over a model's shape.

Estimates from below: what is left out (the buffers of kernels, fragments, libraries) comes on top.
"""

from dataclasses import dataclass

from evolver_async.config import Config

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MASTER_BYTES = 16  # of a trained parameter: float32 value and gradient, two moments of Adam
CRITICS = ("gae", "gae_bilevel", "vtrace")
KEPT_HIDDEN = 4  # of a layer whose activations are kept: at least so many values of hidden size,
KEPT_INNER = 3  # and so many of the size of its MLP


@dataclass(frozen=True)
class Shape:
    """A causal language model's sizes."""

    parameters: int
    layers: int
    kv_heads: int
    head_size: int
    hidden: int
    inner: int
    positions: int


def weight_bytes(config: Config, shape: Shape) -> int:
    """One copy of the policy as engines and files hold it."""
    return shape.parameters * DTYPE_BYTES[config.policy.dtype]


def token_bytes(config: Config, shape: Shape) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_size * DTYPE_BYTES[config.policy.dtype]


def cache_bytes(config: Config, shape: Shape) -> int:
    """The torch engine's keys and values: a full context, and one column more, in every slot."""
    columns = config.engine.slots * (config.policy.max_length + 1)
    return columns * token_bytes(config, shape)


def training_bytes(config: Config, shape: Shape) -> int:
    """Bytes that all ranks of the learner hold together between passes."""
    copy, ranks = weight_bytes(config, shape), config.learner.ranks
    apart = config.advantage.kind in CRITICS and config.critic.kind == "separate"
    if config.policy.lora.rank:  # the adapters are small; only a single rank shares what is frozen
        return copy * (1 + (ranks > 1) * (apart + (config.loss.kl_coef > 0)))
    # Several ranks have no copy in the short type: they cast a layer while they gather it.
    short = copy if config.policy.dtype != "float32" and ranks == 1 else 0
    whole = shape.parameters * MASTER_BYTES + short
    return whole * (1 + apart) + (copy if config.loss.kl_coef else 0)


def activation_bytes(config: Config, shape: Shape) -> int:
    """Bytes that the layers of one forward pass keep for its backward pass, at least."""
    per_token = shape.hidden
    if not config.learner.gradient_checkpointing:
        per_token = KEPT_HIDDEN * shape.hidden + KEPT_INNER * shape.inner
    tokens = config.learner.token_budget or config.policy.max_length
    return tokens * shape.layers * per_token * DTYPE_BYTES[config.policy.dtype]
