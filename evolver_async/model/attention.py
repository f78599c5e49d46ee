"""Attention over packed rows: many sequences in one row, each of which sees itself alone.

Registered with transformers under the name `NAME`; what is not packed it treats as rows padded on
the right. On a GPU in half precision it is torch's flash kernel for sequences of varying length,
elsewhere one causal attention for each run of sequences of about one length. Both need memory that
grows with the tokens, not with their square, but for the mask of a window outside of that kernel.

Shapes: `T` tokens of a packed row, `S` sequences, `B` rows, `H` heads, `D` head size.
"""

import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

NAME = "packed"
FLASH_HEAD = 256  # the kernel takes heads up to this size, in multiples of 8
FLASH_CAPABILITY = (8, 0)
GQA = "enable_gqa"  # newer kernels share keys and values among query heads if told so
ALIKE = 0.75  # of the longest sequence of a run: the shortest that is padded to it


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences of about one length, as rows of `longest`; `place_T`: each token's."""

    tokens: int
    rows: int
    longest: int
    place_T: Tensor


@dataclass(frozen=True)
class Borders:
    """Where the sequences of a packed row begin, and every token's position within its own.

    starts_S1 int32 [S+1], position_1T int64 [1, T].
    """

    starts_S1: Tensor
    position_1T: Tensor
    longest: int
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Borders":
        """Of sequences of these lengths, one after another; at least one, none empty."""
        starts = list(itertools.accumulate(lengths, initial=0))
        positions = torch.cat([torch.arange(length) for length in lengths])
        return cls(
            starts_S1=torch.tensor(starts, dtype=torch.int32).to(device),
            position_1T=positions[None].to(device),
            longest=max(lengths),
            runs=tuple(_run(alike, device) for alike in _alike(lengths)),
        )


def _alike(lengths: list[int]) -> list[list[int]]:
    """Neighbours in runs whose shortest has at least `ALIKE` of the tokens of their longest."""
    runs = [[lengths[0]]]
    low = high = lengths[0]
    for length in lengths[1:]:
        low, high = min(low, length), max(high, length)
        if low >= ALIKE * high:
            runs[-1].append(length)
        else:
            runs.append([length])
            low = high = length
    return runs


def _run(lengths: list[int], device: torch.device) -> Run:
    longest = max(lengths)
    places = [torch.arange(length) + row * longest for row, length in enumerate(lengths)]
    return Run(sum(lengths), len(lengths), longest, torch.cat(places).to(device))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    borders: Borders | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention in the form that transformers calls: [B, H, T, D] to [B, T, H, D].

    With `borders` there is one row (B = 1). A query sees itself and what stands before it in its
    sequence, the last `sliding_window` tokens of that where one is given.
    """
    assert attention_mask is None and dropout == 0.0
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if borders is None:
        return _causal(query, key, value, scaling, sliding_window).transpose(1, 2), None
    q_THD, k_THD, v_THD = (one[0].transpose(0, 1) for one in (query, key, value))
    attend = _flash if flash_fits(query) else _by_runs
    return attend(q_THD, k_THD, v_THD, borders, scaling, sliding_window)[None], None


def flash_fits(query: Tensor) -> bool:
    """Whether the flash kernel takes tensors like this, by device, precision and head size."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and size <= FLASH_HEAD
        and size % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= FLASH_CAPABILITY
    )


def _flash(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    borders: Borders,
    scaling: float,
    window: int | None,
) -> Tensor:
    starts, longest = borders.starts_S1, borders.longest
    shared = query_THD.shape[1] // key_THD.shape[1]
    told: dict[str, Any] = {}
    if GQA in inspect.signature(varlen_attn).parameters:
        told = {GQA: shared > 1}
    elif shared > 1:
        key_THD = key_THD.repeat_interleave(shared, 1)
        value_THD = value_THD.repeat_interleave(shared, 1)
    out = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        starts,
        starts,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **told,
    )
    assert isinstance(out, Tensor)
    return out


def _by_runs(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    borders: Borders,
    scaling: float,
    window: int | None,
) -> Tensor:
    """One attention a run, its sequences padded to the run's longest for that time alone."""
    sizes = [run.tokens for run in borders.runs]
    parts = (one.split(sizes) for one in (query_THD, key_THD, value_THD))
    outs = []
    for run, q_LHD, k_LHD, v_LHD in zip(borders.runs, *parts, strict=True):
        rows = _rows(q_LHD, run), _rows(k_LHD, run), _rows(v_LHD, run)
        out_SHLD = _causal(*rows, scaling, window)
        outs.append(out_SHLD.transpose(1, 2).flatten(0, 1)[run.place_T])
    return torch.cat(outs)


def _rows(part_THD: Tensor, run: Run) -> Tensor:
    """A run's tokens as rows [S, H, longest, D], zero behind their ends."""
    rows = part_THD.new_zeros(run.rows * run.longest, *part_THD.shape[1:])
    rows = rows.index_copy(0, run.place_T, part_THD)
    return rows.unflatten(0, (run.rows, run.longest)).transpose(1, 2)


def _causal(
    query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, scaling: float, window: int | None
) -> Tensor:
    """Causal attention of every row by itself; padding on the right is out of sight."""
    shared = query_BHTD.shape[1] // key_BHTD.shape[1]
    if shared > 1:
        key_BHTD = key_BHTD.repeat_interleave(shared, 1)
        value_BHTD = value_BHTD.repeat_interleave(shared, 1)
    tokens, mask = query_BHTD.shape[2], None
    if window is not None and window < tokens:
        back = torch.arange(tokens, device=query_BHTD.device)
        distance = back[:, None] - back
        mask = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(
        query_BHTD, key_BHTD, value_BHTD, mask, is_causal=mask is None, scale=scaling
    )


AttentionInterface.register(NAME, packed_attention)
