"""Check of a recipe against a machine: the requirements of its keys, and if they are met.

Pure: the machine is given by the results of its probes. Sizes are computed by `memory`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evolver_async.config import Config
from evolver_async.config.sections.weight_channel import channel, versions_kept
from evolver_async.doctor.probes.result import FLASH_CAPABILITY, ProbeResult
from evolver_async.memory.bounds import (
    MASTER_BYTES,
    Shape,
    activation_bytes,
    engine_bytes,
    training_bytes,
    weight_bytes,
)
from evolver_async.memory.gpu_needs import gpu_demands, gpus_used
from evolver_async.memory.units import gib, stored


@dataclass(frozen=True)
class Requirement:
    """Requirement of a key: `met` is None if unknown; `why` names what it needs and gets."""

    key: str
    met: bool | None
    why: str


def requirements(config: Config, results: Mapping[str, ProbeResult]) -> list[Requirement]:
    """Check every key that requires something special of the machine.

    `results` are by the names of `probe_main.PROBES`: `shared memory` is that of `weights.dir`,
    `disk` that of `run.dir`, `model` that of the policy.
    """
    machine, model = Machine(config, results), results["model"]
    config = stored(config, gpu=bool(machine.learner or machine.engine))
    rules = (_hardware, _probed, _precision, _gpus, _engine)
    rows = [row for rule in rules for row in rule(config, machine)]
    if not model.works:
        keys = ("policy.max_length", "engine.memory", "learner.ranks", "weights.dir", "run.dir")
        return rows + [Requirement(key, None, f"unknown: {model.summary}") for key in keys]
    shape = Shape(**model.facts)
    for rule in (_context, _gpu_memory, _host_memory, _free_space):
        rows += rule(config, machine, shape)
    return rows


class Machine:
    """A machine by its probes' results, and the GPUs that a recipe's roles use ([]: the CPU)."""

    def __init__(self, config: Config, results: Mapping[str, ProbeResult]) -> None:
        self.results = results
        self.devices: list[dict[str, Any]] = results["cuda"].facts.get("devices", [])
        self.engine, self.learner = gpus_used(config, len(self.devices))


def _hardware(config: Config, machine: Machine) -> Iterator[Requirement]:
    """Never unmet: with other values of its keys a recipe can run on a smaller machine."""
    if not config.run.hardware:
        return
    count, size = gpus_of(config.run.hardware)
    sizes = [gib(one["bytes"]) for one in machine.devices]
    enough = len([one for one in machine.devices if one["bytes"] >= size]) >= count
    why = f"is written for {count} x {gib(size)}, found: {', '.join(sizes) or 'no GPU'}"
    yield Requirement("run.hardware", True if enough else None, why)


def gpus_of(hardware: str) -> tuple[int, int]:
    """Return the number of GPUs that `run.hardware` names, and the bytes of each."""
    count, size = re.findall(r"\d+", hardware)
    return int(count), int(size) * 10**9


def _probed(config: Config, machine: Machine) -> Iterator[Requirement]:
    """Keys that need the success of a probe."""
    learner, kind, ranks = config.learner, channel(config), config.learner.ranks
    short = config.policy.dtype == "bfloat16" and bool(machine.learner)
    devices = {"engine": config.engine.device, "learner": learner.device}
    for key, probe, needed in (
        *((f"{one}.device={name}", "cuda", "cuda" in name) for one, name in devices.items()),
        (f"learner.ranks={ranks}", "nccl" if machine.learner else "gloo", ranks > 1),
        ("learner.packing", "varlen", learner.packing and short),
        ("weights.kind=collective", "gloo", kind == "collective"),
        ("weights.kind=cuda_ipc", "cuda", kind == "cuda_ipc"),
        ("security.keys", "encryption", bool(config.security.keys)),
    ):
        if needed:
            yield Requirement(key, machine.results[probe].works, machine.results[probe].summary)


def _precision(config: Config, machine: Machine) -> Iterator[Requirement]:
    used = [i for i in {*machine.engine, *machine.learner} if i < len(machine.devices)]
    if config.policy.dtype == "bfloat16" and used:
        least = min(tuple(machine.devices[i]["capability"]) for i in used)
        yield Requirement(
            "policy.dtype=bfloat16",
            least >= FLASH_CAPABILITY,
            f"needs compute capability 8.0 or more, has {least[0]}.{least[1]}",
        )


def _gpus(config: Config, machine: Machine) -> Iterator[Requirement]:
    gpus, count = config.launch.gpus, len(machine.devices)
    for key, spread, named, used in (
        ("launch.gpus.actors", "engine.tensor_parallel", gpus.actors, machine.engine),
        ("launch.gpus.learner", "learner.ranks", gpus.learner, machine.learner),
    ):
        if named or len(used) > 1:
            why = f"needs {max(used, default=0) + 1} GPUs, found {count}"
            yield Requirement(key if named else spread, bool(used) and max(used) < count, why)


def _engine(config: Config, machine: Machine) -> Iterator[Requirement]:
    if config.engine.kind != "vllm":
        return
    vllm, needed = machine.results["vllm"], "cuda" if machine.engine else "cpu"
    fits, why = vllm.facts.get("device") == needed, vllm.summary
    if vllm.works and not fits:
        why += f"; engine.device={config.engine.device} needs a build for {needed}"
    yield Requirement("engine.kind=vllm", vllm.works and fits, why)


def _context(config: Config, machine: Machine, shape: Shape) -> Iterator[Requirement]:
    longest = config.policy.max_length
    if longest > shape.positions:
        why = f"is {longest}, but the model has {shape.positions} positions"
        yield Requirement("policy.max_length", False, why)


def _gpu_memory(config: Config, machine: Machine, shape: Shape) -> Iterator[Requirement]:
    """Check every GPU that the recipe uses."""
    for one in gpu_demands(config, shape, [device["bytes"] for device in machine.devices]):
        yield Requirement(one.key, one.fits, one.why)


def _host_memory(config: Config, machine: Machine, shape: Shape) -> Iterator[Requirement]:
    """Check the host's memory for the roles that compute on the CPU."""
    engines = 0 if machine.engine else config.actors.count
    need = engines * engine_bytes(config, shape)
    if not machine.learner:
        need += training_bytes(config, shape)
        need += config.learner.ranks * activation_bytes(config, shape)
    total = machine.results["python"].facts["memory_bytes"]
    if need:
        why = f"roles without a GPU need at least {gib(need)} of the host's memory, of {gib(total)}"
        yield Requirement("engine.slots" if engines else "learner.device", need <= total, why)


def _free_space(config: Config, machine: Machine, shape: Shape) -> Iterator[Requirement]:
    snapshot = weight_bytes(config, shape)
    memory, disk = machine.results["shared memory"], machine.results["disk"]
    copies = 0
    if channel(config) == "shm" and not config.policy.lora.rank:
        copies += versions_kept(config) + 2  # one is being written, one an actor still maps
    if copies:
        free = memory.facts.get("free_bytes", 0)
        yield Requirement(
            "weights.dir",
            memory.works and free >= copies * snapshot,
            f"needs {gib(copies * snapshot)} for {copies} copies of the weights; {memory.summary}",
        )
    whole = shape.parameters * (MASTER_BYTES - 4)  # no gradients
    trained = 0 if config.policy.lora.rank else whole
    kept = config.checkpoint.keep + config.checkpoint.keep_best
    need = (kept + 1) * trained + config.buffer.segment_bytes  # one is being written
    free = disk.facts.get("free_bytes", 0)
    yield Requirement(
        "run.dir",
        disk.works and free >= need,
        f"needs {gib(need)} for checkpoints and the journal; {disk.summary}",
    )
