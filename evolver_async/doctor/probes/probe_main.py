"""Process of one probe: `python -m evolver_async.doctor.probes.probe_main NAME [ARG …]`.

It prints one line of JSON, the ProbeResult. A library that crashes, hangs or prints affects only
its own probe; `capabilities.py` starts the processes, each with a deadline.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # of the working directory, whose files would hide any module

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from evolver_async.doctor.probes import host_probes, libraries, recipe
from evolver_async.doctor.probes.result import ProbeResult

PROBES: dict[str, Callable[..., ProbeResult]] = {
    "python": host_probes.python,
    "torch": libraries.torch_cpu,
    "cuda": libraries.cuda,
    "nccl": libraries.nccl,
    "gloo": libraries.gloo,
    "varlen": libraries.varlen,
    "vllm": libraries.vllm,
    "faiss": libraries.faiss,
    "ray": libraries.ray,
    "sandbox": host_probes.sandbox,
    "shared memory": host_probes.shared_memory,
    "sockets": host_probes.sockets,
    "encryption": host_probes.encryption,
    "wandb": host_probes.wandb,
    "disk": host_probes.disk,
    "files": host_probes.files,
    "recipe": recipe.recipe,
    "model": recipe.model,
    "pace": recipe.pace,
}


def main(name: str, *arguments: str) -> None:
    """Run one probe; whatever libraries print goes to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        result = PROBES[name](*arguments)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        result = ProbeResult(False, f"{type(error).__name__}: {lines[0]}")
    with suppress(BrokenPipeError), open(answer, "w", encoding="utf-8") as out:
        out.write(json.dumps(asdict(result)))
    os._exit(0)  # threads and exit handlers of a library must not delay or change the result


if __name__ == "__main__":
    main(*sys.argv[1:])
