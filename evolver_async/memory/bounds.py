"""Least bytes that a recipe's models, caches and training need, computed from a model's shape.

Buffers of kernels, fragmentation and libraries need more: what does not fit by these numbers cannot
run. `plan.py` predicts a peak instead.
"""

from dataclasses import dataclass

from evolver_async.config import Config, merge
from evolver_async.memory.units import DTYPE_BYTES

MASTER_BYTES = 16  # of a trained parameter: float32 value and gradient, two moments of Adam
MAX_COPIED = 1 << 28  # parameters of a model whose linear weights an engine on a CPU copies, merged
KEPT_HIDDEN = 4  # least number of activations of hidden size that a layer keeps
KEPT_INNER = 3  # and of activations of the size of its MLP


@dataclass(frozen=True)
class Shape:
    """Sizes of a causal language model."""

    parameters: int
    layers: int
    kv_heads: int
    head_size: int
    hidden: int
    inner: int
    positions: int


def weight_bytes(config: Config, shape: Shape) -> int:
    """Bytes of one copy of the policy, as engines and files hold it."""
    return shape.parameters * DTYPE_BYTES[config.policy.decided_dtype]


def token_bytes(config: Config, shape: Shape) -> int:
    """Bytes of the keys and values of one token in all layers."""
    return (
        2
        * shape.layers
        * shape.kv_heads
        * shape.head_size
        * DTYPE_BYTES[config.policy.decided_dtype]
    )


def cache_bytes(config: Config, shape: Shape) -> int:
    """Bytes of the torch engine's KV cache: a whole context and one more column per slot."""
    columns = config.engine.slots * (config.policy.max_length + 1)
    return columns * token_bytes(config, shape)


def engine_bytes(config: Config, shape: Shape) -> float:
    """Bytes of weights and KV cache on one GPU; vLLM caches at least one whole context."""
    kv = cache_bytes(config, shape)
    if config.engine.kind == "vllm":
        longest = config.policy.max_length * token_bytes(config, shape)
        kv = max(longest / config.engine.tensor_parallel, config.engine.kv_cache_bytes)
    return weight_bytes(config, shape) / config.engine.tensor_parallel + kv


def training_bytes(config: Config, shape: Shape) -> int:
    """Bytes that all ranks of the learner hold together between passes, in the largest stage.

    A reference and a critic that a stage has made are held in the stages behind it, too, a reward
    model until the last stage that trains one.
    """
    most, reference, separate = 0, False, False
    last = max((n for n, one in enumerate(config.stages) if one.kind == "reward_model"), default=-1)
    judged = False
    for index, written in enumerate(config.stages):
        stage = merge.override(config, written.override)
        rl = written.kind == "rl"
        judged = index <= last and (judged or written.kind == "reward_model")
        reference |= written.kind in ("dpo", "kto") or (rl and stage.reads_reference)
        separate |= rl and stage.advantage.facts.critic and config.critic.kind == "separate"
        held = _held_bytes(config, shape, reference=reference, separate=separate)
        most = max(most, held + judged * _trained_bytes(config, shape))
    return most


def _held_bytes(config: Config, shape: Shape, *, reference: bool, separate: bool) -> int:
    """Bytes of the policy in training, and of a reference and a separate critic."""
    copy, ranks = weight_bytes(config, shape), config.learner.ranks
    if config.policy.lora.rank:  # adapters are small; only a single rank shares the frozen weights
        return copy * (1 + (ranks > 1) * (separate + reference))
    whole = _trained_bytes(config, shape)
    return whole * (1 + separate) + (copy if reference else 0)


def _trained_bytes(config: Config, shape: Shape) -> int:
    """Bytes of a whole model in training."""
    copy, ranks = weight_bytes(config, shape), config.learner.ranks
    # Several ranks have no copy in the short type: they cast each layer when they gather it.
    short = copy if config.policy.decided_dtype != "float32" and ranks == 1 else 0
    return shape.parameters * MASTER_BYTES + short


def activation_bytes(config: Config, shape: Shape, *, gpu: bool = False) -> int:
    """Least bytes that the layers of a forward pass keep, in the stage with the largest budget.

    On a GPU without those that are offloaded: the input of one layer is there.
    """
    per_token = shape.hidden
    if not config.learner.gradient_checkpointing:
        per_token = KEPT_HIDDEN * shape.hidden + KEPT_INNER * shape.inner
    stages = [merge.override(config, written.override) for written in config.stages]
    tokens = max(one.learner.token_budget or one.policy.max_length for one in stages)
    layers = 1 if gpu and config.learner.offload_activations else shape.layers
    return tokens * layers * per_token * DTYPE_BYTES[config.policy.decided_dtype]
