"""GPUs that a run uses, what each must hold at least, and the refusal of a run that does not fit.

The start asks the driver's `nvidia-smi`, which takes no GPU memory; `doctor` asks torch.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from evolver_async.config import Config
from evolver_async.config.load import stage_as_written
from evolver_async.config.sections.weight_channel import channel, versions_kept
from evolver_async.config.shape import DecoderShape, shape_of
from evolver_async.config.values.config_error import ConfigError
from evolver_async.memory.bounds import (
    Shape,
    activation_bytes,
    engine_bytes,
    training_bytes,
    weight_bytes,
)
from evolver_async.memory.host_memory import uses_gpu
from evolver_async.memory.plan import largest_teacher
from evolver_async.memory.units import DTYPE_BYTES, MIB, gib, stored

QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
DEADLINE_S = 20.0


@dataclass(frozen=True)
class GpuDemand:
    """Demand on one GPU: the key to change, if it fits, and the figures in words."""

    key: str
    fits: bool
    why: str


def gpus_used(config: Config, count: int) -> tuple[list[int], list[int]]:
    """Return the GPUs of the engines and of the learner among `count`; an empty list is the CPU."""
    gpus = config.launch.gpus

    def used(device: str, numbers: list[int], needed: int) -> list[int]:
        if device == "cpu" or (device == "auto" and not count):
            return []
        first = int(device.partition(":")[2] or 0)
        return numbers or list(range(first, first + needed))

    return (
        used(config.engine.device, gpus.actors, config.engine.tensor_parallel),
        used(config.learner.device, gpus.learner, config.learner.ranks_per_host),
    )


def gpu_demands(config: Config, shape: Shape, totals: Sequence[float]) -> Iterator[GpuDemand]:
    """Compare what every GPU of the recipe must hold at least with its bytes, `totals`."""
    engine, learner = gpus_used(config, len(totals))
    for index in sorted(index for index in {*engine, *learner} if index < len(totals)):
        total, engines = totals[index], engine.count(index)
        if not config.launch.gpus.actors and engines:
            engines = config.actors.count  # all of them use the same GPUs
        share = engine_bytes(config, shape)
        if config.engine.kind == "vllm" and engines:
            reserved = config.engine.memory * total
            if share > reserved:
                why = f"reserves {gib(reserved)}, but weights and KV cache need {gib(share)}"
                yield GpuDemand("engine.memory", False, why)
            share = reserved
        held = _learner_bytes(config, shape) if index in learner else 0.0
        key = "engine.memory" if config.engine.kind == "vllm" else "engine.slots"
        yield GpuDemand(
            key if engines else "learner.ranks",
            engines * share + held <= total,
            f"GPU {index}: engines need {gib(engines * share)}, the learner at least {gib(held)},"
            f" of {gib(total)}",
        )


def _learner_bytes(config: Config, shape: Shape) -> float:
    """Return what one rank holds at least."""
    held = training_bytes(config, shape) / config.learner.shards
    held += activation_bytes(config, shape, gpu=True)
    stages = [stage_as_written(config, index) for index in range(len(config.stages))]
    if (teacher := largest_teacher(stages)) is not None:
        held += (
            teacher.parameters * DTYPE_BYTES[config.policy.decided_dtype] / config.learner.shards
        )
    if not config.policy.lora.rank and channel(config) == "cuda_ipc":
        held += versions_kept(config) * weight_bytes(config, shape)
    return held


def check_gpu_memory(config: Config) -> None:
    """Raise ConfigError for the first GPU that cannot hold what the run puts there.

    Models whose shape is unknown, clusters, and machines without `nvidia-smi` are not checked.
    """
    if config.launch.kind == "ray":
        return
    if not (uses_gpu(config.engine.device) or uses_gpu(config.learner.device)):
        return
    decoder = shape_of(config)
    if decoder is None:
        return
    config = stored(config, gpu=True)
    shape = bounds_of(decoder, config.policy.max_length)
    order, own = os.environ.get("CUDA_DEVICE_ORDER"), os.environ.get("CUDA_VISIBLE_DEVICES")
    for one in gpu_demands(config, shape, visible(_found(), own, order == "PCI_BUS_ID")):
        if not one.fits:
            raise ConfigError(f"{one.key}: {one.why}")


def bounds_of(decoder: DecoderShape, positions: int) -> Shape:
    """Return the sizes of a decoder that the lower bounds need."""
    return Shape(
        *(decoder.parameters, decoder.layers, decoder.kv_heads, decoder.head_size),
        *(decoder.hidden, decoder.inner, positions),
    )


def visible(found: Sequence[tuple[str, float]], own: str | None, by_bus: bool) -> list[float]:
    """Return the bytes of each GPU that this process may use, in its numbering.

    `found`: uuid and bytes of each GPU in the order of the bus; `own`: CUDA_VISIBLE_DEVICES or
    None. CUDA numbers the fastest first, unless `by_bus`: where GPUs differ, each counts as the
    largest. Empty if `own` has a part of a GPU (MIG).
    """
    totals = [size for _, size in found]
    if not by_bus:
        totals = [max(totals, default=0.0)] * len(totals)
    if own is None:
        return totals
    chosen = []
    for entry in filter(None, (part.strip() for part in own.split(","))):
        if entry.isdecimal() and int(entry) < len(totals):
            chosen.append(totals[int(entry)])
        elif named := [size for uuid, size in found if uuid.startswith(entry)]:
            chosen.append(named[0])
        else:
            return []
    return chosen


@cache
def _found() -> list[tuple[str, float]]:
    """Ask the driver for uuid and bytes of each GPU; none if it cannot be asked."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
        rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
        found = [(int(index), uuid.strip(), float(size) * MIB) for index, uuid, size in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return [(uuid, size) for _, uuid, size in sorted(found)]
