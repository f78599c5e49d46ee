"""Which processes may be given which GPUs, as far as the configuration alone can tell."""

from evolver_async.config import Config
from evolver_async.config.values import require


def check_gpus(config: Config) -> None:
    """Raises ConfigError, naming the key, for GPUs that do not suit the processes they go to."""
    gpus, count, ranks = config.launch.gpus, config.actors.count, config.learner.ranks
    _check("actors", gpus.actors, count, config.engine.tensor_parallel)
    _check("learner", gpus.learner, 1, ranks)
    for role, numbers, section in (
        ("actors", gpus.actors, "engine"),
        ("learner", gpus.learner, "learner"),
    ):
        if not numbers:
            continue
        device = getattr(config, section).device
        require(
            device in ("auto", "cuda"),
            f"{section}.device",
            f"must be cuda where launch.gpus.{role} says which one, is {device}",
        )
        require(
            config.launch.kind != "serial",
            f"launch.gpus.{role}",
            "launch.kind=serial is one process, which sees what it sees: leave it empty",
        )


def _check(role: str, numbers: list[int], models: int, shards: int) -> None:
    """`models` copies of a model, each over `shards` GPUs, which must be different ones."""
    name = f"launch.gpus.{role}"
    counted = "actors.count × engine.tensor_parallel" if role == "actors" else "learner.ranks"
    require(
        not numbers or len(numbers) == models * shards,
        name,
        f"must name {models * shards} ({counted}), names {len(numbers)}",
    )
    for start in range(0, len(numbers), shards):
        part = numbers[start : start + shards]
        require(min(part) >= 0, name, f"GPUs are counted from 0, {min(part)} is none")
        require(len(set(part)) == shards, name, f"{part} hold one model: must be different")
