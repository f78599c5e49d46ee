"""Factory of the configured engine, for actors and for evaluation."""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from actors.engines.base import Engine
from actors.engines.torch_engine import TorchEngine
from evolver_async.config import Config
from evolver_async.model import policy
from evolver_async.schema import WeightId
from evolver_async.weights.lora_receiver import whole


def load_engine(
    config: Config, weights: WeightId | None = None, tensors: dict[str, Tensor] | None = None
) -> tuple[Engine, PreTrainedTokenizerBase]:
    """Return the engine and its tokenizer. The engine holds `tensors`, those of a checkpoint, if
    they are given.

    Without `weights` the engine waits for the first update. Set the number of torch's threads to
    `engine.threads`.
    """
    torch.set_num_threads(config.engine.threads)
    tokenizer = policy.load_tokenizer(config.policy.path)
    if config.engine.kind == "vllm":
        engine = _vllm_engine(config, weights, tensors)
    else:
        engine = _torch_engine(config, tokenizer, weights, tensors)
    return engine, tokenizer


def takes_adapters(engine: Engine) -> bool:
    """Return True if updates of the engine bring adapters; False if they bring whole weights."""
    from actors.engines.vllm_engine import VllmEngine

    return isinstance(engine, VllmEngine) and engine.core.adapter is not None


def _torch_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    weights: WeightId | None,
    tensors: dict[str, Tensor] | None,
) -> Engine:
    dtype, device = config.policy.dtype, config.engine.device
    model = policy.load_model(config.policy.path, dtype=dtype, device=device)
    if tensors is not None:
        policy.load_state(model, whole(tensors, config.policy))
    return TorchEngine(
        model,
        tokenizer,
        weights=weights,
        slots=config.engine.slots,
        max_length=config.policy.max_length,
        prefill_tokens=config.engine.prefill_tokens,
        in_flight=config.engine.in_flight,
    )


def _vllm_engine(
    config: Config, weights: WeightId | None, tensors: dict[str, Tensor] | None
) -> Engine:
    from actors.engines.vllm_core import VllmCore
    from actors.engines.vllm_engine import VllmEngine
    from actors.engines.vllm_lora import adapter_of
    from actors.engines.vllm_start import Settings, set_environment

    set_environment()
    adapter = adapter_of(config)
    if tensors is not None and adapter is None:
        tensors = whole(tensors, config.policy)
    settings = Settings(
        path=config.policy.path,
        dtype=config.policy.dtype,
        directory=config.weights.dir,
        max_length=config.policy.max_length,
        adapter=adapter,
        **vars(config.engine),
    )
    core = VllmCore(settings, weights, tensors)
    return VllmEngine(
        core,
        vocabulary=core.vocabulary,
        slots=config.engine.slots,
        max_length=config.policy.max_length,
        in_flight=config.engine.in_flight,
    )
