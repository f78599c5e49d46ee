"""Whether a recipe can run on a machine, key by key: what each wants, against what probes found.

Pure: the machine is what `doctor.py` found out about it. Sizes are those of `sizes.py`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evolver_async.config import Config
from evolver_async.config.sections.channel import channel, versions_kept
from evolver_async.doctor.probes import FLASH_CAPABILITY, Found, gib
from evolver_async.doctor.sizes import (
    MASTER_BYTES,
    Shape,
    activation_bytes,
    cache_bytes,
    token_bytes,
    training_bytes,
    weight_bytes,
)


@dataclass(frozen=True)
class Verdict:
    """True if what a key asks for is there, None if unknown; `why` says what it needs or gets."""

    key: str
    works: bool | None
    why: str


def verdicts(config: Config, found: Mapping[str, Found]) -> list[Verdict]:
    """About every key that wants something special of the machine.

    `found`: by the names of `probes.PROBES`, with `shared memory` of `weights.dir`, `disk` of
    `run.dir` and `model` of the policy.
    """
    machine, model = Machine(config, found), found["model"]
    rules = (_hardware, _devices, _gpus, _engine, _learner, _weights, _outside)
    said = [verdict for rule in rules for verdict in rule(config, machine)]
    if not model.works:
        keys = ("policy.max_length", "engine.memory", "learner.ranks", "weights.dir", "run.dir")
        return said + [Verdict(key, None, f"unknown: {model.said}") for key in keys]
    shape = Shape(**model.facts)
    for sized in (_context, _gpu_memory, _host_memory, _room):
        said += sized(config, machine, shape)
    return said


class Machine:
    """What was found, and which of its GPUs the roles of a recipe would use ([]: the CPU)."""

    def __init__(self, config: Config, found: Mapping[str, Found]) -> None:
        self.found = found
        self.devices: list[dict[str, Any]] = found["cuda"].facts.get("devices", [])
        gpus = config.launch.gpus
        self.engine = self._used(config.engine.device, gpus.actors, config.engine.tensor_parallel)
        self.learner = self._used(config.learner.device, gpus.learner, config.learner.ranks)

    def _used(self, device: str, numbers: list[int], count: int) -> list[int]:
        if device == "cpu" or (device == "auto" and not self.devices):
            return []
        first = int(device.partition(":")[2] or 0)
        return numbers or list(range(first, first + count))

    def has(self, key: str, probe: str, unless: str = "") -> Verdict:
        """Whether a probe found what a key needs; `unless`: what else is wrong with it."""
        one = self.found[probe]
        return Verdict(key, one.works and not unless, unless if one.works and unless else one.said)


def _hardware(config: Config, machine: Machine) -> Iterator[Verdict]:
    """A smaller machine may do where the recipe's keys are changed, so that this refuses none."""
    if not config.run.hardware:
        return
    count, size = gpus_of(config.run.hardware)
    here = [gib(one["bytes"]) for one in machine.devices]
    enough = len([one for one in machine.devices if one["bytes"] >= size]) >= count
    said = f"written for {count} x {gib(size)}, here: {', '.join(here) or 'no GPU'}"
    yield Verdict("run.hardware", True if enough else None, said)


def gpus_of(hardware: str) -> tuple[int, int]:
    """Number of GPUs that `run.hardware` names, and the bytes of each."""
    count, size = re.findall(r"\d+", hardware)
    return int(count), int(size) * 10**9


def _devices(config: Config, machine: Machine) -> Iterator[Verdict]:
    for key, device in (
        ("engine.device", config.engine.device),
        ("learner.device", config.learner.device),
    ):
        if device.startswith("cuda"):
            yield machine.has(f"{key}={device}", "cuda")
    used = [i for i in {*machine.engine, *machine.learner} if i < len(machine.devices)]
    if config.policy.dtype == "bfloat16" and used:
        least = min(tuple(machine.devices[i]["capability"]) for i in used)
        yield Verdict(
            "policy.dtype=bfloat16",
            least >= FLASH_CAPABILITY,
            f"needs compute capability 8.0 or more, has {least[0]}.{least[1]}",
        )


def _gpus(config: Config, machine: Machine) -> Iterator[Verdict]:
    gpus, count = config.launch.gpus, len(machine.devices)
    for key, named, used in (
        ("launch.gpus.actors", gpus.actors, machine.engine),
        ("launch.gpus.learner", gpus.learner, machine.learner),
    ):
        if named or len(used) > 1:
            shown = key if named else _SPREAD[key]
            why = f"needs {max(used, default=0) + 1} GPUs, there are {count}"
            yield Verdict(shown, bool(used) and max(used) < count, why)


_SPREAD = {"launch.gpus.actors": "engine.tensor_parallel", "launch.gpus.learner": "learner.ranks"}


def _engine(config: Config, machine: Machine) -> Iterator[Verdict]:
    if config.engine.kind != "vllm":
        return
    wanted = "cuda" if machine.engine else "cpu"
    built = machine.found["vllm"].facts.get("device")
    other = f"{machine.found['vllm'].said}; engine.device={config.engine.device} wants {wanted}"
    yield machine.has("engine.kind=vllm", "vllm", "" if built == wanted else other)


def _learner(config: Config, machine: Machine) -> Iterator[Verdict]:
    learner = config.learner
    if learner.ranks > 1:
        yield machine.has(f"learner.ranks={learner.ranks}", "nccl" if machine.learner else "gloo")
    if learner.packing and machine.learner and config.policy.dtype == "bfloat16":
        yield machine.has("learner.packing", "varlen")


def _weights(config: Config, machine: Machine) -> Iterator[Verdict]:
    kind = channel(config)
    if kind == "collective":
        yield machine.has("weights.kind=collective", "gloo")
    if kind == "cuda_ipc":
        one = len({*machine.engine, *machine.learner}) == 1 and machine.engine and machine.learner
        apart = "" if one else "learner and engines are not on one GPU"
        yield machine.has("weights.kind=cuda_ipc", "cuda", apart)


def _context(config: Config, machine: Machine, shape: Shape) -> Iterator[Verdict]:
    longest = config.policy.max_length
    if longest > shape.positions:
        why = f"the model has {shape.positions} positions, {longest} are wanted"
        yield Verdict("policy.max_length", False, why)


def _gpu_memory(config: Config, machine: Machine, shape: Shape) -> Iterator[Verdict]:
    """About every GPU that the recipe uses."""
    used = {*machine.engine, *machine.learner}
    for index in sorted(index for index in used if index < len(machine.devices)):
        total = machine.devices[index]["bytes"]
        engines = machine.engine.count(index)
        if not config.launch.gpus.actors and engines:
            engines = config.actors.count  # they all see the same GPUs
        share = _engine_bytes(config, shape)
        if config.engine.kind == "vllm" and engines:
            reserved = config.engine.memory * total
            if share > reserved:
                why = f"{gib(reserved)} cannot hold {gib(share)} of weights and KV cache"
                yield Verdict("engine.memory", False, why)
            share = reserved
        held = 0.0
        if index in machine.learner:
            held = training_bytes(config, shape) / config.learner.ranks
            held += activation_bytes(config, shape)
            if not config.policy.lora.rank and channel(config) == "cuda_ipc":
                held += versions_kept(config) * weight_bytes(config, shape)
        key = "engine.memory" if config.engine.kind == "vllm" else "engine.slots"
        yield Verdict(
            key if engines else "learner.ranks",
            engines * share + held <= total,
            f"GPU {index}: {gib(engines * share)} for engines and at least {gib(held)} for the"
            f" learner, of {gib(total)}",
        )


def _engine_bytes(config: Config, shape: Shape) -> float:
    """On one GPU: weights and KV cache; vLLM's holds one whole context at least."""
    kv = cache_bytes(config, shape)
    if config.engine.kind == "vllm":
        longest = config.policy.max_length * token_bytes(config, shape)
        kv = max(longest / config.engine.tensor_parallel, config.engine.kv_cache_bytes)
    return weight_bytes(config, shape) / config.engine.tensor_parallel + kv


def _host_memory(config: Config, machine: Machine, shape: Shape) -> Iterator[Verdict]:
    """About what computes on the CPU."""
    engines = 0 if machine.engine else config.actors.count
    if config.launch.kind == "serial":
        engines = min(engines, 1)
    need = engines * _engine_bytes(config, shape)
    if not machine.learner:
        need += training_bytes(config, shape) + config.learner.ranks * activation_bytes(
            config, shape
        )
    total = machine.found["python"].facts["memory_bytes"]
    if need:
        why = f"at least {gib(need)} of the host's memory for what has no GPU, of {gib(total)}"
        yield Verdict("engine.slots" if engines else "learner.device", need <= total, why)


def _room(config: Config, machine: Machine, shape: Shape) -> Iterator[Verdict]:
    snapshot = weight_bytes(config, shape)
    memory, disk = machine.found["shared memory"], machine.found["disk"]
    copies = 0
    if channel(config) == "shm" and not config.policy.lora.rank:
        copies += versions_kept(config) + 1  # and one that is being written
    if config.engine.kind == "vllm":
        copies += 2 * config.actors.count  # each brings its workers what they have, and what is new
    if copies:
        free = memory.facts.get("free_bytes", 0)
        yield Verdict(
            "weights.dir",
            memory.works and free >= copies * snapshot,
            f"needs {gib(copies * snapshot)} for {copies} copies of the weights; {memory.said}",
        )
    trained = (
        0 if config.policy.lora.rank else shape.parameters * (MASTER_BYTES - 4)
    )  # no gradients
    need = (config.checkpoint.keep + 1) * trained + config.buffer.segment_bytes
    free = disk.facts.get("free_bytes", 0)
    yield Verdict(
        "run.dir",
        disk.works and free >= need,
        f"needs {gib(need)} for checkpoints and the journal; {disk.said}",
    )


def _outside(config: Config, machine: Machine) -> Iterator[Verdict]:
    if config.security.keys:
        yield machine.has("security.keys", "encryption")
    if config.metrics.wandb == "online":
        yield machine.has("metrics.wandb=online", "wandb")
