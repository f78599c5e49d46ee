"""What a machine can do, one probe a process: `python -m evolver_async.doctor.probes NAME [ARG …]`.

A probe imports what it is about, uses it once in small, and prints one line of JSON: whether it
works, what there is in words, and facts for `verdict.py`. Libraries that crash, hang or print hurt
nobody but their own probe; who runs them, with a deadline, is `doctor.py`.
"""

import importlib.util
import itertools
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

LEAST_PYTHON = (3, 11)
LEAST_SHM_BYTES = 64 << 20
LEAST_DISK_BYTES = 1 << 30
LEAST_FILES = 1024
FLASH_CAPABILITY = (8, 0)  # Ampere: bfloat16 and flash attention


@dataclass(frozen=True)
class Found:
    """What a probe found out; `facts` are plain values."""

    works: bool
    said: str
    facts: dict[str, Any] = field(default_factory=dict)


def python() -> Found:
    """The interpreter, and what it runs on."""
    import psutil

    memory = psutil.virtual_memory().total
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    said = f"{platform.python_version()}, {cores} cores, {gib(memory)} of memory"
    return Found(sys.version_info >= LEAST_PYTHON, said, {"memory_bytes": memory})


def torch_cpu() -> Found:
    """A gradient on the CPU, and transformers beside it."""
    import torch
    import transformers

    x = torch.ones(4, 4, requires_grad=True)
    (x @ x).sum().backward()
    works = x.grad is not None and bool((x.grad == 8).all())
    return Found(works, f"torch {torch.__version__}, transformers {transformers.__version__}")


def cuda() -> Found:
    """Every GPU that this process sees, each with a product of its own in bfloat16."""
    import torch

    if torch.version.cuda is None:
        return Found(False, f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        return Found(False, f"torch is built for CUDA {torch.version.cuda}, but sees no GPU")
    devices, works = [], True
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        ones = torch.ones(64, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
        works &= bool(((ones @ ones) == 64).all())
        free, total = torch.cuda.mem_get_info(index)
        capability = [about.major, about.minor]
        devices.append(
            {"name": about.name, "bytes": total, "free_bytes": free, "capability": capability}
        )
    said = "\n".join(
        f"{index}: {one['name']}, {gib(one['bytes'])}, {gib(one['free_bytes'])} free,"
        f" compute capability {'.'.join(map(str, one['capability']))}"
        for index, one in enumerate(devices)
    )
    return Found(works, said, {"devices": devices})


def nccl() -> Found:
    """A sum over one rank."""
    import torch
    import torch.cuda.nccl
    import torch.distributed

    dist: Any = torch.distributed
    if not dist.is_nccl_available():
        return Found(False, f"torch {torch.__version__} has no NCCL")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    if not torch.cuda.is_available():
        return Found(False, f"NCCL {version}, but no GPU")
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=20))
    group = dist.ProcessGroupNCCL(store, 0, 1, dist.ProcessGroupNCCL.Options())
    ones = torch.ones(4, device="cuda:0")
    group.allreduce([ones]).wait()
    torch.cuda.synchronize()
    return Found(bool((ones == 1).all()), f"NCCL {version}")


def gloo() -> Found:
    """A broadcast between two ranks on the loopback interface."""
    import torch
    import torch.distributed

    dist: Any = torch.distributed
    if not dist.is_gloo_available():
        return Found(False, f"torch {torch.__version__} has no gloo")
    deadline = timedelta(seconds=20)
    master = dist.TCPStore("127.0.0.1", 0, None, True, deadline, wait_for_workers=False)
    tensors = [torch.zeros(1024), torch.ones(1024)]

    def rank(number: int) -> None:
        store = dist.TCPStore(
            "127.0.0.1", master.port, None, False, deadline, wait_for_workers=False
        )
        group = dist.ProcessGroupGloo(dist.PrefixStore("probe/", store), number, 2, deadline)
        group.broadcast([tensors[number]], _root(dist, 1)).wait()

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Found(bool((tensors[0] == 1).all()), "a broadcast over the loopback interface")


def _root(dist: Any, rank: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def varlen() -> Found:
    """Attention over packed sequences, against each sequence by itself."""
    import torch

    if not torch.cuda.is_available():
        return Found(False, "needs a GPU; on the CPU packed sequences are attended one by one")
    if torch.cuda.get_device_capability() < FLASH_CAPABILITY:
        return Found(False, "needs compute capability 8.0 or more")
    from torch.nn.attention.varlen import varlen_attn
    from torch.nn.functional import scaled_dot_product_attention

    ends, heads, size = (0, 5, 16), 2, 64
    q, k, v = torch.randn(3, ends[-1], heads, size, device="cuda", dtype=torch.bfloat16)
    borders = torch.tensor(ends, device="cuda", dtype=torch.int32)
    packed = varlen_attn(q, k, v, borders, borders, 11, 11, window_size=(-1, 0))
    assert isinstance(packed, torch.Tensor)
    worst = 0.0
    for start, end in itertools.pairwise(ends):
        mine = [one[None, start:end].transpose(1, 2) for one in (q, k, v)]
        alone = scaled_dot_product_attention(mine[0], mine[1], mine[2], is_causal=True)
        alone = alone.transpose(1, 2)[0]
        worst = max(worst, float((packed[start:end] - alone).abs().max()))
    return Found(worst < 0.05, f"torch's varlen attention, {worst:.4f} off sequence by sequence")


def vllm() -> Found:
    """The version, and what it was built for."""
    if importlib.util.find_spec("vllm") is None:
        return Found(False, "not installed here")
    os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    device = str(current_platform.device_type)
    said = f"vLLM {vllm.__version__} for {device or 'no device that is here'}"
    return Found(bool(device), said, {"device": device})


def faiss() -> Found:
    """A search in small."""
    if importlib.util.find_spec("faiss") is None:
        return Found(False, "not installed; numpy searches instead, slower above 10,000 entries")
    owners = sorted(packages_distributions().get("faiss", []))
    if len(owners) > 1:
        both = ", ".join(owners)
        return Found(False, f"{both} own one folder: uninstall all of them, install one again")
    import faiss
    import numpy as np

    index = faiss.IndexFlatIP(4)
    index.add(np.eye(4, dtype=np.float32))  # pyright: ignore[reportCallIssue]
    _, places = index.search(np.eye(4, dtype=np.float32)[2:3], 1)  # pyright: ignore[reportCallIssue]
    count = faiss.get_num_gpus()
    said = f"faiss {faiss.__version__}, {f'{count} GPUs' if count else 'CPU'}"
    return Found(int(places[0, 0]) == 2, said, {"gpus": count})


def ray() -> Found:
    """Whether it imports."""
    if importlib.util.find_spec("ray") is None:
        return Found(False, "not installed")
    import ray  # pyright: ignore[reportMissingImports]

    return Found(True, f"Ray {ray.__version__}")


def sandbox() -> Found:
    """A confined interpreter, which checks its walls from within."""
    from evolver_async.launch.registry import resolve

    ways: Any = resolve("actors.sandbox.pool:WAYS")
    pool = resolve("actors.sandbox.pool:Pool")(size=1)
    try:
        route = pool.start()
    except RuntimeError as refusal:
        return Found(False, str(refusal))
    finally:
        pool.close()
    return Found(True, ways[route])


def shared_memory(directory: str = "/dev/shm") -> Found:
    """A file written and read back, and the room for more."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x" * (1 << 20))
            file.seek(0)
            same = file.read() == b"x" * (1 << 20)
    except OSError as error:
        return Found(False, f"{directory}: {error.strerror}")
    free = shutil.disk_usage(directory).free
    said = f"{directory}, {gib(free)} free"
    return Found(same and free >= LEAST_SHM_BYTES, said, {"free_bytes": free})


def sockets() -> Found:
    """A message over a socket file and over a loopback port."""
    import zmq

    with tempfile.TemporaryDirectory(prefix="evolver-") as directory:
        for address in (f"ipc://{directory}/socket", "tcp://127.0.0.1:*"):
            with zmq.Context() as context, context.socket(zmq.PAIR) as server:
                server.bind(address)
                with context.socket(zmq.PAIR) as client:
                    client.connect(server.get_string(zmq.LAST_ENDPOINT))
                    client.send(b"x")
                    if not server.poll(5000) or server.recv() != b"x":
                        return Found(False, f"nothing arrives at {address}")
    return Found(True, f"ZeroMQ {zmq.zmq_version()}: socket files and loopback ports")


def encryption() -> Found:
    """CURVE in the installed ZeroMQ."""
    import zmq

    works = bool(zmq.has("curve"))
    return Found(works, "CurveZMQ" if works else f"ZeroMQ {zmq.zmq_version()} without CURVE")


def wandb() -> Found:
    """Whether metrics can go online."""
    import wandb

    from evolver_async.metrics.wandb_process import has_key

    online = has_key()
    said = f"wandb {wandb.__version__}, {'a key: online' if online else 'no key: offline only'}"
    return Found(online, said)


def disk(directory: str = "runs") -> Found:
    """Room where the runs will be."""
    there = Path(directory).resolve()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    works = free >= LEAST_DISK_BYTES and os.access(there, os.W_OK)
    said = f"{there}, {gib(free)} free" + ("" if os.access(there, os.W_OK) else ", not writable")
    return Found(works, said, {"free_bytes": free})


def files() -> Found:
    """How many files and sockets one process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    said = "no limit" if unlimited else f"{soft} a process" + (f", up to {hard}" * (hard > soft))
    return Found(unlimited or soft >= LEAST_FILES, said)


def model(path: str, *dotlist: str) -> Found:
    """The sizes of a recipe's policy, from its configuration alone; no weights are read."""
    from evolver_async.config.load import load

    policy = load(path, dotlist).policy
    if policy.path and not Path(policy.path).is_dir():
        return Found(False, f"path missing: {policy.path}")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from evolver_async.model.tiny import make_tokenizer, tiny_shape

    config: Any = (
        AutoConfig.from_pretrained(policy.path, local_files_only=True)
        if policy.path
        else tiny_shape(
            make_tokenizer(policy.max_length),
            hidden_size=policy.hidden_size,
            layers=policy.layers,
            heads=policy.heads,
            intermediate_size=policy.intermediate_size,
        )
    )
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    heads = config.num_attention_heads
    facts = {
        "parameters": sum(one.numel() for one in made.parameters()),
        "layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "positions": config.max_position_embeddings,
    }
    return Found(True, f"{type(made).__name__}, {facts['parameters']:,} parameters", facts)


def recipe(path: str, *dotlist: str) -> Found:
    """What the start of this recipe would refuse: paths, the wings' checks, addresses."""
    from evolver_async.config.load import load
    from evolver_async.config.paths import check_paths
    from evolver_async.launch.registry import check_wings
    from evolver_async.launch.run_directory import check_addresses

    config = load(path, dotlist)
    problems = []
    for check in (check_paths, check_wings, check_addresses):
        try:
            check(config)
        except ValueError as error:
            problems.append(str(error))
    return Found(not problems, "\n".join(problems), {"problems": problems})


def gib(count: float) -> str:
    """Bytes for people."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


PROBES: dict[str, Callable[..., Found]] = {
    "python": python,
    "torch": torch_cpu,
    "cuda": cuda,
    "nccl": nccl,
    "gloo": gloo,
    "varlen": varlen,
    "vllm": vllm,
    "faiss": faiss,
    "ray": ray,
    "sandbox": sandbox,
    "shared memory": shared_memory,
    "sockets": sockets,
    "encryption": encryption,
    "wandb": wandb,
    "disk": disk,
    "files": files,
    "recipe": recipe,
    "model": model,
}


def main(name: str, *arguments: str) -> None:
    """Run one probe; whatever libraries print goes to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        found = PROBES[name](*arguments)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        found = Found(False, f"{type(error).__name__}: {lines[0]}")
    with suppress(BrokenPipeError), open(answer, "w", encoding="utf-8") as out:
        out.write(json.dumps(asdict(found)))
    os._exit(0)  # a library's own threads and exit handlers are not part of the question


if __name__ == "__main__":
    main(*sys.argv[1:])
