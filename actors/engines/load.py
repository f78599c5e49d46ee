"""Makes the engine that a configuration asks for, the same for actors and for evaluation."""

import torch
from torch import Tensor

from actors.chat import Chat
from actors.engines.torch_engine import TorchEngine
from evolver_async import policy
from evolver_async.config import Config
from evolver_async.schema import WeightId


def load_engine(
    config: Config, weights: WeightId | None = None, tensors: dict[str, Tensor] | None = None
) -> tuple[TorchEngine, Chat]:
    """The engine and its tokenizer's conversations; holds `tensors` where they are given.

    Without `weights` the first update brings them. `engine.threads` becomes the number of threads
    of this process' torch.
    """
    torch.set_num_threads(config.engine.threads)
    tokenizer = policy.load_tokenizer(config.policy.path)
    model = policy.load_model(
        config.policy.path, dtype=config.policy.dtype, device=config.engine.device
    )
    if tensors is not None:
        policy.load_state(model, tensors)
    engine = TorchEngine(
        model,
        tokenizer,
        weights=weights,
        slots=config.engine.slots,
        max_length=config.policy.max_length,
        prefill_tokens=config.engine.prefill_tokens,
        in_flight=config.engine.in_flight,
    )
    return engine, Chat(tokenizer)
