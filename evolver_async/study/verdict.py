"""Whether a recipe can run on a machine, key by key: what each wants, against what probes found.

Pure: the machine is what `doctor.py` found out about it. Sizes are estimates from the number of
parameters; activations, KV cache and what libraries take for themselves come on top.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evolver_async.config import Config
from evolver_async.config.channels import channel, versions_kept
from evolver_async.study.probes import FLASH_CAPABILITY, Found, gib

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MASTER_BYTES = 16  # of a trained parameter: float32 value and gradient, two moments of Adam
CRITICS = ("gae", "gae_bilevel", "vtrace")


@dataclass(frozen=True)
class Verdict:
    """Whether what a key asks for is there; `why` says what it needs, or what it gets."""

    key: str
    works: bool
    why: str


def verdicts(config: Config, found: Mapping[str, Found], parameters: int) -> list[Verdict]:
    """About every key that wants something special of the machine.

    `found`: by the names of `probes.PROBES`, with `shared memory` of `weights.dir` and `disk` of
    `run.dir`. `parameters`: of the policy.
    """
    machine = Machine(config, found)
    rules = (_devices, _gpus, _engine, _learner, _weights, _memory, _room, _outside)
    return [verdict for rule in rules for verdict in rule(config, machine, parameters)]


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


def _devices(config: Config, machine: Machine, _: int) -> Iterator[Verdict]:
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


def _gpus(config: Config, machine: Machine, _: int) -> Iterator[Verdict]:
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


def _engine(config: Config, machine: Machine, _: int) -> Iterator[Verdict]:
    if config.engine.kind != "vllm":
        return
    wanted = "cuda" if machine.engine else "cpu"
    built = machine.found["vllm"].facts.get("device")
    other = f"{machine.found['vllm'].said}; engine.device={config.engine.device} wants {wanted}"
    yield machine.has("engine.kind=vllm", "vllm", "" if built == wanted else other)


def _learner(config: Config, machine: Machine, _: int) -> Iterator[Verdict]:
    learner = config.learner
    if learner.ranks > 1:
        yield machine.has(f"learner.ranks={learner.ranks}", "nccl" if machine.learner else "gloo")
    if learner.packing and machine.learner and config.policy.dtype == "bfloat16":
        yield machine.has("learner.packing", "varlen")


def _weights(config: Config, machine: Machine, _: int) -> Iterator[Verdict]:
    kind = channel(config)
    if kind == "collective":
        yield machine.has("weights.kind=collective", "gloo")
    if kind == "cuda_ipc":
        one = len({*machine.engine, *machine.learner}) == 1 and machine.engine and machine.learner
        apart = "" if one else "learner and engines are not on one GPU"
        yield machine.has("weights.kind=cuda_ipc", "cuda", apart)


def _memory(config: Config, machine: Machine, parameters: int) -> Iterator[Verdict]:
    """The fullest GPU of each kind of use."""
    weights = parameters * DTYPE_BYTES[config.policy.dtype]
    for index in sorted({*machine.engine, *machine.learner}):
        if index >= len(machine.devices):
            continue
        total = machine.devices[index]["bytes"]
        engines = machine.engine.count(index)
        if not config.launch.gpus.actors and engines:
            engines = config.actors.count  # they all see the same GPUs
        share = weights / config.engine.tensor_parallel
        if config.engine.kind == "vllm":
            reserved = config.engine.memory * total
            if engines and share > reserved:
                yield Verdict(
                    "engine.memory", False, f"{gib(reserved)} cannot hold {gib(share)} of weights"
                )
            share = reserved
        trained = _training_bytes(config, parameters) / config.learner.ranks
        trained *= machine.learner.count(index)
        published = not config.policy.lora.rank and channel(config) == "cuda_ipc"
        if published and index in machine.learner:
            trained += versions_kept(config) * weights
        need = engines * share + trained
        yield Verdict(
            "engine.memory" if engines and config.engine.kind == "vllm" else "learner.ranks",
            need <= total,
            f"GPU {index}: {gib(engines * share)} for engines and {gib(trained)} for the learner"
            f" without activations, of {gib(total)}",
        )


def _training_bytes(config: Config, parameters: int) -> float:
    """What all ranks of the learner hold together, without activations."""
    copy = parameters * DTYPE_BYTES[config.policy.dtype]
    apart = config.advantage.kind in CRITICS and config.critic.kind == "separate"
    if config.policy.lora.rank:  # the adapters are small; only a single rank shares what is frozen
        return copy * (1 + (config.learner.ranks > 1) * (apart + (config.loss.kl_coef > 0)))
    whole = parameters * MASTER_BYTES + (copy if config.policy.dtype != "float32" else 0)
    return whole * (1 + apart) + (copy if config.loss.kl_coef else 0)


def _room(config: Config, machine: Machine, parameters: int) -> Iterator[Verdict]:
    snapshot = parameters * DTYPE_BYTES[config.policy.dtype]
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
    trained = 0 if config.policy.lora.rank else parameters * (MASTER_BYTES - 4)  # no gradients
    need = (config.checkpoint.keep + 1) * trained + config.buffer.segment_bytes
    free = disk.facts.get("free_bytes", 0)
    yield Verdict(
        "run.dir",
        disk.works and free >= need,
        f"needs {gib(need)} for checkpoints and the journal; {disk.said}",
    )


def _outside(config: Config, machine: Machine, _: int) -> Iterator[Verdict]:
    if config.security.keys:
        yield machine.has("security.keys", "encryption")
    if config.metrics.wandb == "online":
        yield machine.has("metrics.wandb=online", "wandb")
