"""Factory of the configured engine, for actors and for evaluation."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from actors.engines.engine import Engine
from actors.engines.torch_engine import TorchEngine
from actors.weights.source import FetchedWeights, VersionSource
from evolver_async.config import Config
from evolver_async.config.shape import shape_of
from evolver_async.launch.registry import resolve
from evolver_async.memory.vllm_limits import CPU_KV_BYTES, cpu_kv_bytes
from evolver_async.model import policy
from evolver_async.model.precision import load_policy, stored_dtype
from evolver_async.schema import WeightId
from evolver_async.weights.ends import ReceiverSettings, receiver, receiver_settings
from evolver_async.weights.lora_receiver import whole

if TYPE_CHECKING:
    from actors.engines.vllm_engine import VllmEngine

FORWARD_S = 5.0  # of one forward of an actor: RENEW and a stop wait for its end


def load_engine(
    config: Config, weights: WeightId | None = None, tensors: dict[str, Tensor] | None = None
) -> tuple[Engine, PreTrainedTokenizerBase]:
    """Return an engine that keeps its weights, and its tokenizer.

    The weights are `tensors`, those of a checkpoint, if they are given, else those of the policy
    directory. Set the number
    of torch's threads to `engine.threads`.
    """
    torch.set_num_threads(config.engine.threads)
    tokenizer = policy.load_tokenizer(config.policy.path)
    if config.engine.kind == "vllm":
        return _vllm_engine(config, weights, tensors), tokenizer
    return _torch_engine(config, tokenizer, weights, tensors), tokenizer


def follow_weights(
    config: Config, address: str, name: str, tell: Callable[[str], None] | None = None
) -> tuple[Engine, VersionSource, PreTrainedTokenizerBase]:
    """Return an engine without weights, the source of its weights, and its tokenizer.

    `address`: that of the weight channel. `name`: the actor's. `tell` is given the cause of every
    death of an engine's processes. Set the number of torch's threads to `engine.threads`.
    """
    torch.set_num_threads(config.engine.threads)
    tokenizer = policy.load_tokenizer(config.policy.path)
    settings = receiver_settings(config, address)
    if config.engine.kind == "vllm":
        engine = _vllm_engine(config, None, None, settings, name, tell)
        return engine, engine, tokenizer
    # Steps of a serial run do not depend on the machine's speed.
    forward_s = math.inf if config.launch.kind == "serial" else FORWARD_S
    engine = _torch_engine(config, tokenizer, None, None, forward_s)
    return engine, FetchedWeights(receiver(settings, config.engine.device, name), engine), tokenizer


def _torch_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    weights: WeightId | None,
    tensors: dict[str, Tensor] | None,
    forward_s: float = math.inf,
) -> TorchEngine:
    dtype, device = config.policy.decided_dtype, config.engine.device
    model = load_policy(config.policy.path, dtype=dtype, device=device)
    if tensors is not None:
        policy.load_state(model, whole(tensors, config.policy, stored_dtype(dtype, device)))
    return TorchEngine(
        model,
        tokenizer,
        weights=weights,
        slots=config.engine.slots,
        max_length=config.policy.max_length,
        prefill_tokens=config.engine.prefill_tokens,
        in_flight=config.engine.in_flight,
        forward_s=forward_s,
    )


def _vllm_engine(
    config: Config,
    weights: WeightId | None,
    tensors: dict[str, Tensor] | None,
    settings: ReceiverSettings | None = None,
    name: str = "engine",
    tell: Callable[[str], None] | None = None,
) -> "VllmEngine":
    resolve("actors.engines.vllm_core:VllmCore")  # the first import, without garbage collections
    from actors.engines.vllm_core import VllmCore
    from actors.engines.vllm_engine import VllmEngine
    from actors.engines.vllm_lora import adapter_of
    from actors.engines.vllm_start import Settings, set_environment

    set_environment()
    adapter = adapter_of(config)
    if adapter is not None and settings is not None:
        settings = msgspec.structs.replace(settings, base="")  # served beside the base weights
    if adapter is None and tensors is not None:
        tensors = whole(tensors, config.policy, config.policy.decided_dtype)
    shape = shape_of(config)
    starting = Settings(
        path=config.policy.path,
        dtype=config.policy.decided_dtype,
        directory=config.weights.dir,
        max_length=config.policy.max_length,
        adapter=adapter,
        cpu_kv_bytes=cpu_kv_bytes(config, shape) if shape else CPU_KV_BYTES,
        **vars(config.engine),
    )
    core = VllmCore(starting, weights, tensors, receiver=settings, name=name, tell=tell)
    return VllmEngine(
        core,
        vocabulary=core.vocabulary,
        slots=config.engine.slots,
        max_length=config.policy.max_length,
        in_flight=config.engine.in_flight,
    )
