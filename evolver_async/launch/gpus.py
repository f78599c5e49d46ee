"""Which GPUs a child of the launcher sees."""

from evolver_async.config import Config, ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def seen_by(config: Config, role: str, index: int, here: str | None) -> dict[str, str]:
    """What to set in the environment of process `index` (from 0) of a role; {}: nothing.

    `here` is the launcher's own CUDA_VISIBLE_DEVICES, None where it has none: `launch.gpus` counts
    within it. Raises ConfigError for a GPU that is not in it.
    """
    gpus, wide = config.launch.gpus, config.engine.tensor_parallel
    if role == "actor":
        key, mine = "launch.gpus.actors", gpus.actors[index * wide : (index + 1) * wide]
    elif role == "learner":
        key, mine = "launch.gpus.learner", gpus.learner[index : index + 1]
    else:
        return {}
    if not mine:
        return {}
    if here is None:
        return {VISIBLE: ",".join(map(str, mine))}
    there = [entry.strip() for entry in here.split(",") if entry.strip()]
    if max(mine) >= len(there):
        raise ConfigError(f"{key}: {max(mine)} is not within {VISIBLE}={here}")
    return {VISIBLE: ",".join(there[number] for number in mine)}


def number_of(name: str) -> int:
    """The number of a process within its role: 3 of actor-3, 0 of a name without."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def check_seen(config: Config, here: str | None) -> None:
    """Raises ConfigError for GPUs of `launch.gpus` that this process cannot give away."""
    for index in range(config.actors.count):
        seen_by(config, "actor", index, here)
    for index in range(config.learner.ranks):
        seen_by(config, "learner", index, here)
