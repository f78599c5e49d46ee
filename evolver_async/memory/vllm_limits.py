"""Limits of vLLM, by which it would refuse a recipe after half a minute: known before the start.

Plain arithmetic for vLLM 0.32 and 0.33. A model whose shape is unknown is left to vLLM itself.
"""

import os
import tempfile
from collections.abc import Iterator

from evolver_async.config import Config
from evolver_async.config.shape import DecoderShape, shape_of
from evolver_async.config.values.config_error import ConfigError
from evolver_async.memory.units import DTYPE_BYTES, MIB, gib, stored
from evolver_async.wire.addresses import IPC_PATH_BYTES

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of its attention on CPUs
CPU_BLOCK = 32  # tokens per block of KV; the minimum of its kernels on CPUs
GPU_BLOCK = 16
CPU_KV_BYTES = 128 * MIB  # least size of a KV cache on a CPU that is chosen here
CPU_KV_TOKENS = 512  # of each slot that such a cache holds, if the context is as long
SOCKET_NAME = 36  # characters that it gives a socket in TMPDIR: a UUID
SOCKETS = "VLLM_RPC_BASE_PATH"  # environment variable with another directory for them


def check_vllm(config: Config, gpu: bool) -> None:
    """Raise ConfigError, naming key and number, for the first thing that vLLM would refuse here.

    `gpu`: the engine computes on GPUs.
    """
    if config.engine.kind != "vllm":
        return
    for key, problem in (*_sockets(), *_model(config, gpu)):
        raise ConfigError(f"{key}: {problem}")


def cpu_kv_bytes(config: Config, shape: DecoderShape) -> int:
    """Bytes of the KV cache of each worker on a CPU: `engine.kv_cache_bytes`, or what holds one
    whole context, and a part of one for every slot."""
    if config.engine.kv_cache_bytes:
        return config.engine.kv_cache_bytes
    usual = config.engine.slots * min(config.policy.max_length, CPU_KV_TOKENS)
    whole = _context_bytes(config, shape, CPU_BLOCK)
    return max(CPU_KV_BYTES, whole, usual * _token_bytes(config, shape))


def _token_bytes(config: Config, shape: DecoderShape) -> int:
    """Bytes of a token's keys and values in one worker; heads are repeated if workers are more."""
    heads = max(1, shape.kv_heads // config.engine.tensor_parallel)
    numbers = 2 * shape.layers * heads * shape.head_size
    return numbers * DTYPE_BYTES[config.policy.decided_dtype]


def _context_bytes(config: Config, shape: DecoderShape, block: int) -> int:
    """Bytes of the blocks of one whole context, and of the one that vLLM keeps empty."""
    blocks = -(-config.policy.max_length // block) + 1
    return blocks * block * _token_bytes(config, shape)


def _sockets() -> Iterator[tuple[str, str]]:
    directory = os.environ.get(SOCKETS, tempfile.gettempdir())
    size, most = len(os.fsencode(directory)), IPC_PATH_BYTES - SOCKET_NAME - 1
    if size > most:
        name = SOCKETS if SOCKETS in os.environ else "TMPDIR"
        yield (
            "engine.kind",
            f"vllm puts sockets into {directory} ({name}), whose path has {size} bytes, more than"
            f" {most}: set a shorter {name}",
        )


def _model(config: Config, gpu: bool) -> Iterator[tuple[str, str]]:
    """Compare the model's shape with the settings of the engine."""
    shape, parts = shape_of(config), config.engine.tensor_parallel
    if shape is None:
        return
    kv_heads = shape.kv_heads
    for name, number, divided in (
        ("attention heads", shape.heads, shape.heads % parts == 0),
        ("heads of keys and values", kv_heads, kv_heads % parts == 0 or parts % kv_heads == 0),
        ("inner values of an MLP", shape.inner, shape.inner % parts == 0),
    ):
        if not divided:
            yield (
                "engine.tensor_parallel",
                f"{parts} workers cannot share the {number} {name} of the model",
            )
    if not gpu and config.launch.kind == "ray" and config.engine.device != "cpu":
        return  # the nodes can have GPUs
    if not gpu and shape.head_size not in HEAD_SIZES:
        key = "policy.path" if config.policy.path else "policy.heads"
        sizes = ", ".join(map(str, HEAD_SIZES))
        yield (
            key,
            f"vllm needs heads of a size of {sizes} on a CPU, the model's have {shape.head_size}"
            + ("" if config.policy.path else " (policy.hidden_size / policy.heads)"),
        )
    if not gpu and shape.experts > 1 and (not config.policy.lora.rank or config.engine.merge_lora):
        why = (
            "vllm ends on a CPU with the second update of experts, of which its kernels keep copies"
        )
        yield "engine.kind", f"{why}: torch samples from such a model"
    given = config.engine.kv_cache_bytes
    held = stored(config, gpu) if gpu else config  # on a CPU it has the policy's own type
    whole = _context_bytes(held, shape, GPU_BLOCK if gpu else CPU_BLOCK)
    if given and not shape.windowed and given < whole:
        yield (
            "engine.kv_cache_bytes",
            f"is {given} ({gib(given)}), and one context of policy.max_length="
            f"{config.policy.max_length} needs {whole} ({gib(whole)})",
        )
