"""What changed between two versions of the same layout: blocks of bytes, sent instead of the whole.

Pure: bytes in, bytes out. What is rebuilt is verified by its checksums like everything received.
"""

import torch
from torch import Tensor

BLOCK = 4096  # bytes; the last one of a version may be shorter
CHUNK = 16384  # blocks compared at a time, which bounds the memory that comparing takes
MOST = 0.5  # share of changed blocks above which the whole is sent: gathering costs time as well
MOST_RUNS = 1 << 16


def changed(new_N: Tensor, old_N: Tensor) -> list[tuple[int, int]] | None:
    """Runs (first block, number of blocks) that differ; None where the whole should be sent."""
    if len(new_N) != len(old_N):
        return None
    whole = len(new_N) // BLOCK
    differs_B = torch.zeros(whole + 1, dtype=torch.bool)
    for start in range(0, whole, CHUNK):
        part = slice(start * BLOCK, min(whole, start + CHUNK) * BLOCK)
        new, old = (x_N[part].view(torch.int64).view(-1, BLOCK // 8) for x_N in (new_N, old_N))
        differs_B[start : start + len(new)] = (new != old).any(dim=1)
    differs_B[whole] = not torch.equal(new_N[whole * BLOCK :], old_N[whole * BLOCK :])
    if int(differs_B.sum()) > MOST * (whole + 1):
        return None
    edges = torch.diff(differs_B.to(torch.int8), prepend=torch.zeros(1), append=torch.zeros(1))
    starts, ends = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    if len(starts) > MOST_RUNS:
        return None
    return [(int(start), int(end - start)) for start, end in zip(starts, ends, strict=True)]


def gathered(new_N: Tensor, runs: list[tuple[int, int]]) -> Tensor:
    """The bytes of the runs, one after another."""
    parts = [new_N[start * BLOCK : (start + count) * BLOCK] for start, count in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def apply(base_N: Tensor, runs: list[tuple[int, int]], delta_N: Tensor, out_N: Tensor) -> None:
    """Write into `out_N` the base with its runs replaced. ValueError where the sizes do not fit."""
    if len(out_N) != len(base_N) or len(delta_N) != size(runs, len(base_N)):
        raise ValueError(f"a delta of {len(delta_N)} bytes does not fit {len(base_N)}")
    out_N.copy_(base_N)
    at = 0
    for start, count in runs:
        part_N = out_N[start * BLOCK : (start + count) * BLOCK]
        part_N.copy_(delta_N[at : at + len(part_N)])
        at += len(part_N)


def size(runs: list[tuple[int, int]], total: int) -> int:
    """Bytes of the runs of a version of `total` bytes."""
    return sum(min((start + count) * BLOCK, total) - start * BLOCK for start, count in runs)
