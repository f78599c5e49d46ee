"""Checks of processes: model, engine, GPUs and the order of their timeouts."""

from collections.abc import Iterator
from typing import Any

from evolver_async.config.sections import Config

LEAST_TEMPERATURE = 0.01  # vLLM replaces a lower positive temperature by this one ...
MOST_TEMPERATURE = 2.0  # ... and refuses requests with a higher one than this


def policy(config: Config) -> Iterator[tuple[str, str]]:
    """Require that the model's shape and its context suit rollouts and the learner."""
    policy, rollout, learner = config.policy, config.rollout, config.learner
    size, longest = policy.hidden_size, f"policy.max_length ({policy.max_length})"
    if not policy.path and size % (2 * policy.heads):
        unit = f"2 × policy.heads ({2 * policy.heads})"
        yield "policy.hidden_size", f"must be a multiple of {unit}, is {size}"
    if rollout.max_tokens >= policy.max_length:
        yield "rollout.max_tokens", f"must be less than {longest}, is {rollout.max_tokens}"
    if 0 < learner.token_budget * learner.context_parallel < policy.max_length:
        times = f", divided by learner.context_parallel ({learner.context_parallel})"
        whole = f"must hold one sequence of {longest} tokens"
        yield "learner.token_budget", whole + times * (learner.context_parallel > 1)
    if not learner.token_budget and learner.device == "cpu":
        yield "learner.token_budget", "0 measures a GPU's memory, and learner.device is cpu"


def engine(config: Config) -> Iterator[tuple[str, str]]:
    """Refuse settings that the engine of this kind does not support."""
    engine = config.engine
    if engine.kind == "torch":
        if engine.tensor_parallel != 1:
            reason = "with engine.kind=torch one process holds the whole model"
            yield "engine.tensor_parallel", f"must be 1: {reason}"
        return
    if config.launch.kind == "serial":
        yield "engine.kind", "vllm needs real time, and launch.kind=serial has a virtual clock"
    if ":" in engine.device:
        reason = "vllm uses the GPUs of launch.gpus"
        yield "engine.device", f"must be cuda: {reason}, is {engine.device}"
    if engine.prefill_tokens < engine.slots:
        yield (
            "engine.prefill_tokens",
            f"must be at least engine.slots ({engine.slots}), from each of which vllm takes a token"
            f" in a step, is {engine.prefill_tokens}",
        )
    sections: dict[str, Any] = {"rollout": config.rollout, "eval": config.eval}
    sections |= {f"eval.sets.{name}": chosen for name, chosen in config.eval.sets.items()}
    if config.questioning.kind == "goals":  # llm explores by an endpoint
        sections["questioning"] = config.questioning
    for section, settings in sections.items():
        temperature = settings.temperature
        if not (temperature == 0 or LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE):
            bounds = f"at least {LEAST_TEMPERATURE} and at most {MOST_TEMPERATURE:g}"
            yield (
                f"{section}.temperature",
                f"must be {bounds} with engine.kind=vllm, is {temperature}",
            )


def gpus(config: Config) -> Iterator[tuple[str, str]]:
    """Require that the GPUs of each role suit its processes."""
    models, shards = config.actors.bounds()[1], config.engine.tensor_parallel
    counted = f"actors.{'max' if config.actors.max else 'count'} × engine.tensor_parallel"
    yield from _role_gpus(config, "actors", "engine", models, shards, counted)
    ranks, hosts = config.learner.ranks_per_host, config.learner.hosts
    counted = "learner.ranks" if hosts == 1 else "learner.ranks / learner.hosts"
    yield from _role_gpus(config, "learner", "learner", 1, ranks, counted)


def _role_gpus(
    config: Config, role: str, section: str, models: int, shards: int, counted: str
) -> Iterator[tuple[str, str]]:
    """Check the GPUs of `models` copies of the model, each split over `shards` GPUs."""
    key, numbers = f"launch.gpus.{role}", getattr(config.launch.gpus, role)
    if not numbers:
        return
    if len(numbers) != models * shards:
        yield key, f"must name {models * shards} ({counted}), names {len(numbers)}"
    for start in range(0, len(numbers), shards):
        part = numbers[start : start + shards]
        if len(set(part)) < shards:
            yield key, f"{part} hold one model: must be different"
    device = getattr(config, section).device
    if device not in ("auto", "cuda"):
        yield f"{section}.device", f"must be cuda where {key} names the GPUs, is {device}"
    if config.launch.kind == "serial":
        yield key, "launch.kind=serial is one process: must be empty"
    if config.launch.kind == "ray":
        own = f"launch.ray.{role.removesuffix('s')}_gpus"
        yield key, f"must be empty with launch.kind=ray: set {own}"


def cluster(config: Config) -> Iterator[tuple[str, str]]:
    """Require GPUs from Ray for what is to run on them."""
    if config.launch.kind != "ray":
        return
    ray, wide = config.launch.ray, config.engine.tensor_parallel
    needed = {"actor_gpus": (config.engine, wide), "learner_gpus": (config.learner, 1)}
    for key, (section, least) in needed.items():
        if section.device == "cuda" and getattr(ray, key) < (least if least > 1 else 1e-9):
            yield f"launch.ray.{key}", f"must be at least {least} for device=cuda"


def scaling(config: Config) -> Iterator[tuple[str, str]]:
    """Require that the number of actors can be kept within its bounds."""
    actors, (low, high) = config.actors, config.actors.bounds()
    if low > actors.count:
        yield "actors.min", f"must be at most actors.count ({actors.count}), is {low}"
    if high < actors.count:
        yield "actors.max", f"must be at least actors.count ({actors.count}), is {high}"
    if low < high and config.launch.kind == "serial":
        yield "actors.max", "launch.kind=serial has a fixed number of actors: must be 0"


def timeouts(config: Config) -> Iterator[tuple[str, str]]:
    """Require consistent staleness, sizes and timeouts of the buffer."""
    buffer, actors, step = config.buffer, config.actors, config.env.step_timeout_s
    bound, lag = buffer.max_staleness, actors.weight_lag
    if lag > bound:
        yield "actors.weight_lag", f"must be at most buffer.max_staleness ({bound}), is {lag}"
    if (low := actors.weight_lag_low) > lag:
        yield "actors.weight_lag_low", f"must be at most actors.weight_lag ({lag}), is {low}"
    if 0 < buffer.max_ready < 1:
        yield "buffer.max_ready", f"must be 0 or at least 1, is {buffer.max_ready:g}"
    if step >= buffer.stall_s:
        limit = f"less than buffer.stall_s ({buffer.stall_s:g})"
        yield "env.step_timeout_s", f"must be {limit}: a ticket makes no progress during a step"
    if step >= config.eval.timeout_s:
        limit = f"more than env.step_timeout_s ({step:g})"
        yield "eval.timeout_s", f"must be {limit}: an evaluation makes no progress during a step"
    if buffer.segment_bytes > (limit_bytes := buffer.disk_limit_bytes):
        yield "buffer.segment_bytes", f"must fit into buffer.disk_limit_bytes ({limit_bytes})"
