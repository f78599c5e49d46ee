"""GPUs that are visible to the processes of a launch."""

from evolver_async.config import Config, ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(config: Config, role: str, index: int, own: str | None) -> dict[str, str]:
    """Return the variable to set in the environment of process `index` (from 0) of a role, if any.

    `own` is the launcher's CUDA_VISIBLE_DEVICES or None: `launch.gpus` counts within it. Raises
    ConfigError for a GPU that is not in it.
    """
    gpus, wide = config.launch.gpus, config.engine.tensor_parallel
    if role == "actor":
        key, given = "launch.gpus.actors", gpus.actors[index * wide : (index + 1) * wide]
    elif role == "learner":
        number = index % config.learner.ranks_per_host
        key, given = "launch.gpus.learner", gpus.learner[number : number + 1]
    else:
        return {}
    if not given:
        return {}
    if own is None:
        return {VISIBLE: ",".join(map(str, given))}
    devices = [entry.strip() for entry in own.split(",") if entry.strip()]
    if max(given) >= len(devices):
        raise ConfigError(
            f"{key}: {max(given)} is not within {VISIBLE}={own}; numbers count its entries from 0"
        )
    return {VISIBLE: ",".join(devices[number] for number in given)}


def index_of(name: str) -> int:
    """Return the index of a process within its role: 3 for actor-3, 0 for a name without one."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def check_visible(config: Config, own: str | None) -> None:
    """Raise ConfigError if `launch.gpus` names a GPU that is not visible to this process."""
    for index in range(config.actors.bounds()[1]):
        visible_gpus(config, "actor", index, own)
    for index in range(config.learner.ranks_per_host):
        visible_gpus(config, "learner", index, own)
