"""Memory that this host can still give, and the refusal of a run that does not fit into it."""

import shutil
from dataclasses import replace
from pathlib import Path

import psutil

from evolver_async.config import Config
from evolver_async.config.sections.weight_channel import channel
from evolver_async.config.shape import DecoderShape, shape_of
from evolver_async.config.values.config_error import ConfigError
from evolver_async.memory.plan import MemoryPlan, memory_plan
from evolver_async.memory.units import gib

MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
CACHED = ("active_file", "inactive_file")
DEVICES = Path("/dev")
ADAPTER_RANK = 16  # of the adapters that a refusal proposes


def available_bytes() -> int:
    """Return the memory that new processes can get: of the host, or of a cgroup if less.

    Pages of files that the kernel can drop count as free.
    """
    groups = _memory_groups(MEMBERSHIP, CGROUPS)
    return min([psutil.virtual_memory().available, *filter(None, map(_left, groups))])


def _memory_groups(membership: Path, root: Path) -> set[Path]:
    """Return the directories of the memory cgroups that hold this process, up to the root's."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return set()
    groups: set[Path] = set()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        inside = (top / path.lstrip("/")).resolve()  # a namespace can hide what is above
        groups |= {top, *(one for one in (inside, *inside.parents) if one.is_relative_to(top))}
    return groups


def _left(group: Path) -> int | None:
    """Return what the limit of a cgroup leaves; None without a limit."""
    for limit, used in LIMITS:
        try:
            free = int((group / limit).read_text()) - int((group / used).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such cgroup, or "max"
            continue
        whole = "total_" if "total_cache" in stat else ""  # of cgroup 1, with the groups below
        return max(1, free + sum(int(stat.get(f"{whole}{name}", 0)) for name in CACHED))
    return None


def check_memory(config: Config) -> None:
    """Raise ConfigError if this host cannot hold the run, naming the key that takes the most.

    Models whose shape is unknown, and clusters, are not checked; `gpus.py` checks GPUs.
    """
    shape = _checked_shape(config)
    if shape is None:
        return
    gpus = uses_gpu(config.learner.device), uses_gpu(config.engine.device)
    plan = memory_plan(config, shape, learner_gpu=gpus[0], actor_gpu=gpus[1])
    if problem := problem_of(plan, available_bytes(), shared_free(config)):
        raise ConfigError(f"{problem}{_adapters(config, shape, gpus, plan)}")


def check_more_actors(config: Config, more: int) -> None:
    """Raise ConfigError if this host cannot hold so many actors beside what it holds now.

    The same runs are not checked as by `check_memory`.
    """
    shape = _checked_shape(config)
    if shape is None or more <= 0:
        return
    gpus = uses_gpu(config.learner.device), uses_gpu(config.engine.device)
    plan = memory_plan(config, shape, learner_gpu=gpus[0], actor_gpu=gpus[1])
    (actor,) = (one for one in plan.processes if one.role == "actor")
    needed, available = more * actor.private, available_bytes()
    if needed > available:
        raise ConfigError(
            f"actors: {more} more need {gib(needed)} of memory ({gib(actor.private)} each), and"
            f" {gib(available)} are available"
        )


def _checked_shape(config: Config) -> DecoderShape | None:
    """Return the shape of the model of a run whose memory can be planned, else None."""
    return shape_of(config) if config.launch.kind in ("local", "serial") else None


def _adapters(
    config: Config, shape: DecoderShape, gpus: tuple[bool, bool], plan: MemoryPlan
) -> str:
    """Propose adapters in place of full training of a given model, if they need less."""
    if not config.policy.path or config.policy.lora.rank:
        return ""
    lora = replace(config.policy.lora, rank=ADAPTER_RANK)
    adapted = replace(config, policy=replace(config.policy, lora=lora))
    needed = memory_plan(adapted, shape, learner_gpu=gpus[0], actor_gpu=gpus[1]).host
    less = f"; policy.lora.rank={ADAPTER_RANK} trains adapters and needs {gib(needed)}"
    return less if needed < plan.host else ""


def problem_of(plan: MemoryPlan, available: float, shared: float | None) -> str:
    """Return why a plan does not fit, beginning with the key to change; "" if it fits.

    `shared`: free bytes where the weights' files go; None where these are on disk.
    """
    if shared is not None and plan.shared > shared:
        return (
            f"weights.dir: the files of weights need {gib(plan.shared)} of shared memory,"
            f" {gib(shared)} are free"
        )
    if plan.host <= available:
        return ""
    part = plan.largest()
    return (
        f"{part.key}: the run needs {gib(plan.host)} of memory and {gib(available)} are"
        f" available; most of it, {gib(part.size)}, is for {part.name}"
        f" (evolver-async doctor RECIPE shows every part)"
    )


def shared_free(config: Config) -> float | None:
    """Return the free bytes of `weights.dir`; None if it does not exist yet."""
    if channel(config) != "shm":
        return None
    try:
        return shutil.disk_usage(config.weights.dir).free
    except OSError:
        return None


def uses_gpu(device: str) -> bool:
    """True if a device needs a GPU; auto is checked as if there were none, unless one is found.

    A container sees the GPUs that it was given by their numbers on the host.
    """
    return "cuda" in device or (device == "auto" and any(DEVICES.glob("nvidia[0-9]*")))
