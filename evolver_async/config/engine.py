"""What an engine can be asked for, as far as the configuration alone can tell."""

from evolver_async.config import Config
from evolver_async.config.values import require

LEAST_TEMPERATURE = 0.01  # vLLM raises anything between it and 0 to it


def check_engine(config: Config) -> None:
    """Raises ConfigError, naming the key, for what the engine of this kind cannot do."""
    engine = config.engine
    if engine.kind == "torch":
        require(
            engine.tensor_parallel == 1,
            "engine.tensor_parallel",
            "one process holds the whole model where engine.kind is torch: must be 1",
        )
        return
    require(
        config.launch.kind != "serial",
        "engine.kind",
        "vllm needs real time, which launch.kind=serial has not",
    )
    require(
        engine.device in ("auto", "cpu", "cuda"),
        "engine.device",
        f"vllm takes the GPUs that it sees (launch.gpus): must be cuda, is {engine.device}",
    )
    require(
        engine.prefill_tokens >= engine.slots,
        "engine.prefill_tokens",
        f"vllm takes a token of every slot in a step: must be at least engine.slots "
        f"({engine.slots}), is {engine.prefill_tokens}",
    )
    for name, temperature in (
        ("rollout.temperature", config.rollout.temperature),
        ("eval.temperature", config.eval.temperature),
    ):
        require(
            temperature == 0 or temperature >= LEAST_TEMPERATURE,
            name,
            f"vllm samples at {LEAST_TEMPERATURE} or above, is {temperature}",
        )
