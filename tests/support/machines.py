"""Machines for the checks of `doctor`: the results that its probes would have there."""

from typing import Any

from evolver_async.doctor.probes.probe_main import PROBES
from evolver_async.doctor.probes.result import ProbeResult

GIB, GB = 1 << 30, 10**9


def machine(
    *gpus: dict[str, Any], host_bytes: int = 512 * GIB, **changes: ProbeResult
) -> dict[str, ProbeResult]:
    """A machine with everything, of which `changes` are otherwise."""
    found = {name: ProbeResult(True, f"{name} is there") for name in PROBES}
    found["python"] = ProbeResult(True, "3.11", {"memory_bytes": host_bytes})
    found["shared memory"] = ProbeResult(True, "/dev/shm", {"free_bytes": host_bytes // 4 * 3})
    found["disk"] = ProbeResult(True, "runs", {"free_bytes": 2000 * GIB})
    found["vllm"] = ProbeResult(True, "vLLM", {"device": "cuda" if gpus else "cpu"})
    found["cuda"] = ProbeResult(bool(gpus), f"{len(gpus)} GPUs", {"devices": list(gpus)})
    return found | changes
