"""Bytes, of types and in words."""

from dataclasses import replace

from evolver_async.config import Config

MIB = 1 << 20
GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FLOAT = DTYPE_BYTES["float32"]


def stored(config: Config, gpu: bool) -> Config:
    """Return the configuration with the type that the policy's weights have on a GPU or a CPU.

    `auto` is what a run would choose. A single process on a CPU holds float32 and rounds it for
    products alone; several ranks cast it, as on GPUs.
    """
    dtype = config.policy.dtype
    if dtype == "auto":
        dtype = "bfloat16" if gpu and config.policy.path else "float32"
    elif not gpu and config.learner.ranks == 1:
        dtype = "float32"
    return replace(config, policy=replace(config.policy, dtype=dtype))


def gib(count: float) -> str:
    """Format a number of bytes in GiB, below one in MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
