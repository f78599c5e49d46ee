"""Machines for `doctor`'s verdicts: what its probes would have found there."""

from typing import Any

from evolver_async.doctor.probes import PROBES, Found

GIB, GB = 1 << 30, 10**9


def machine(
    *gpus: dict[str, Any], host_bytes: int = 512 * GIB, **changes: Found
) -> dict[str, Found]:
    """A machine with everything, of which `changes` are otherwise."""
    found = {name: Found(True, f"{name} is there") for name in PROBES}
    found["python"] = Found(True, "3.11", {"memory_bytes": host_bytes})
    found["shared memory"] = Found(True, "/dev/shm", {"free_bytes": host_bytes // 4 * 3})
    found["disk"] = Found(True, "runs", {"free_bytes": 2000 * GIB})
    found["vllm"] = Found(True, "vLLM", {"device": "cuda" if gpus else "cpu"})
    found["cuda"] = Found(bool(gpus), f"{len(gpus)} GPUs", {"devices": list(gpus)})
    return found | changes
