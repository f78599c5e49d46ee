"""Probes of libraries and GPUs: torch, CUDA, collectives, flash attention, vLLM, faiss and Ray."""

import importlib.util
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import packages_distributions
from typing import Any

from evolver_async.doctor.probes.result import FLASH_CAPABILITY, ProbeResult
from evolver_async.memory.units import gib


def torch_cpu() -> ProbeResult:
    """Compute a gradient on the CPU; import transformers."""
    import torch
    import transformers

    x = torch.ones(4, 4, requires_grad=True)
    (x @ x).sum().backward()
    works = x.grad is not None and bool((x.grad == 8).all())
    return ProbeResult(works, f"torch {torch.__version__}, transformers {transformers.__version__}")


def cuda() -> ProbeResult:
    """Multiply bfloat16 matrices on every GPU that this process sees."""
    import torch

    if torch.version.cuda is None:
        return ProbeResult(False, f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        return ProbeResult(
            False,
            f"torch for CUDA {torch.version.cuda} finds no GPU: see driver, CUDA_VISIBLE_DEVICES",
        )
    devices, works = [], True
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        ones = torch.ones(64, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
        works &= bool(((ones @ ones) == 64).all())
        free, total = torch.cuda.mem_get_info(index)
        capability = [properties.major, properties.minor]
        devices.append(
            {"name": properties.name, "bytes": total, "free_bytes": free, "capability": capability}
        )
    summary = "\n".join(
        f"{index}: {one['name']}, {gib(one['bytes'])}, {gib(one['free_bytes'])} free,"
        f" compute capability {'.'.join(map(str, one['capability']))}"
        for index, one in enumerate(devices)
    )
    return ProbeResult(works, summary, {"devices": devices})


def nccl() -> ProbeResult:
    """Sum a tensor over one rank."""
    import torch
    import torch.cuda.nccl
    import torch.distributed

    dist: Any = torch.distributed
    if not dist.is_nccl_available():
        return ProbeResult(False, f"torch {torch.__version__} has no NCCL")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    if not torch.cuda.is_available():
        return ProbeResult(False, f"NCCL {version}, but no GPU")
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=20))
    group = dist.ProcessGroupNCCL(store, 0, 1, dist.ProcessGroupNCCL.Options())
    ones = torch.ones(4, device="cuda:0")
    group.allreduce([ones]).wait()
    torch.cuda.synchronize()
    return ProbeResult(bool((ones == 1).all()), f"NCCL {version}")


def gloo() -> ProbeResult:
    """Broadcast a tensor between two ranks on the loopback interface."""
    import torch
    import torch.distributed

    dist: Any = torch.distributed
    if not dist.is_gloo_available():
        return ProbeResult(False, f"torch {torch.__version__} has no gloo")
    deadline, options = timedelta(seconds=20), dist.BroadcastOptions()
    options.rootRank = 1
    master = dist.TCPStore("127.0.0.1", 0, None, True, deadline, wait_for_workers=False)
    tensors = [torch.zeros(1024), torch.ones(1024)]

    def rank(number: int) -> None:
        store = dist.TCPStore(
            "127.0.0.1", master.port, None, False, deadline, wait_for_workers=False
        )
        group = dist.ProcessGroupGloo(dist.PrefixStore("probe/", store), number, 2, deadline)
        group.broadcast([tensors[number]], options).wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, (0, 1)))
    return ProbeResult(bool((tensors[0] == 1).all()), "a broadcast over the loopback interface")


def varlen() -> ProbeResult:
    """Compare attention over packed sequences with attention over each sequence alone."""
    import torch

    if not torch.cuda.is_available():
        return ProbeResult(
            False, "needs a GPU; on the CPU each packed sequence is attended separately"
        )
    if torch.cuda.get_device_capability() < FLASH_CAPABILITY:
        return ProbeResult(False, "needs compute capability 8.0 or more")
    from torch.nn.attention.varlen import varlen_attn
    from torch.nn.functional import scaled_dot_product_attention

    ends, heads, size = (0, 5, 16), 2, 64
    q, k, v = torch.randn(3, ends[-1], heads, size, device="cuda", dtype=torch.bfloat16)
    borders = torch.tensor(ends, device="cuda", dtype=torch.int32)
    packed = varlen_attn(q, k, v, borders, borders, 11, 11, window_size=(-1, 0))
    assert isinstance(packed, torch.Tensor)
    worst = 0.0
    for start, end in itertools.pairwise(ends):
        parts = [one[None, start:end].transpose(1, 2) for one in (q, k, v)]
        alone = scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        alone = alone.transpose(1, 2)[0]
        worst = max(worst, float((packed[start:end] - alone).abs().max()))
    return ProbeResult(
        worst < 0.05,
        f"torch's varlen attention, largest difference from single sequences {worst:.4f}",
    )


def vllm() -> ProbeResult:
    """Import vLLM and read the kind of device that it was built for."""
    if importlib.util.find_spec("vllm") is None:
        return ProbeResult(False, "not installed")
    os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    device = str(current_platform.device_type)
    summary = f"vLLM {vllm.__version__} for {device or 'a device that this machine lacks'}"
    return ProbeResult(bool(device), summary, {"device": device})


def faiss() -> ProbeResult:
    """Search an index of four vectors."""
    if importlib.util.find_spec("faiss") is None:
        return ProbeResult(
            False, "not installed; numpy searches instead, which is slower above 10,000 entries"
        )
    owners = sorted(packages_distributions().get("faiss", []))
    if len(owners) > 1:
        both = ", ".join(owners)
        return ProbeResult(
            False, f"{both} share one folder: uninstall all of them, then install one"
        )
    import faiss
    import numpy as np

    index = faiss.IndexFlatIP(4)
    index.add(np.eye(4, dtype=np.float32))  # pyright: ignore[reportCallIssue]
    _, places = index.search(np.eye(4, dtype=np.float32)[2:3], 1)  # pyright: ignore[reportCallIssue]
    count = faiss.get_num_gpus()
    summary = f"faiss {faiss.__version__}, {f'{count} GPUs' if count else 'CPU'}"
    return ProbeResult(int(places[0, 0]) == 2, summary, {"gpus": count})


def ray() -> ProbeResult:
    """Import Ray."""
    if importlib.util.find_spec("ray") is None:
        return ProbeResult(False, "not installed")
    import ray  # pyright: ignore[reportMissingImports]

    return ProbeResult(True, f"Ray {ray.__version__}")
