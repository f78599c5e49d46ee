"""Attention over packed rows on a GPU in half precision, trees of sequences included.

torch's flash kernel takes sequences of varying length. For a tree it computes the attention of
every segment to itself, and once for each level of branches that of all tokens below them to them.
Softmax parts over different keys are merged by their normalisers; given the merged output and
normaliser, the kernel's backward pass of each part returns its share of the gradient.

Shapes: `T` tokens of a packed row, `N` tokens of a kernel's sequences, `H` heads (`K` of keys and
values), `D` head size.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from evolver_async.model.rows.borders import Borders, BranchLevel, Sequences

HEAD = 256  # the kernel takes heads up to this size, in multiples of 8
CAPABILITY = (8, 0)
HALF = (torch.bfloat16, torch.float16)
GQA = "enable_gqa"  # argument of newer kernels: share keys and values among query heads

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


def fits(query: Tensor) -> bool:
    """True if the kernel supports the device, precision and head size of this tensor."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in HALF
        and size <= HEAD
        and size % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= CAPABILITY
    )


def attend(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    borders: Borders,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """Compute the attention of a packed row, [T, H, D]; with a `window` there are no branches."""
    if borders.branches:
        out = LevelAttention.apply(query_THD, key_TKD, value_TKD, borders, scaling)
        assert isinstance(out, Tensor)
        return out
    starts, longest = borders.starts_S1, borders.longest
    shared = query_THD.shape[1] // key_TKD.shape[1]
    options: dict[str, Any] = {}
    if GQA in inspect.signature(varlen_attn).parameters:
        options = {GQA: shared > 1}
    elif shared > 1:
        key_TKD = key_TKD.repeat_interleave(shared, 1)
        value_TKD = value_TKD.repeat_interleave(shared, 1)
    out = varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        starts,
        starts,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    assert isinstance(out, Tensor)
    return out


class LevelAttention(torch.autograd.Function):
    """Attention of tokens to their segment, up to themselves, and to all segments above it."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        borders: Borders,
        scaling: float,
    ) -> Tensor:
        parts = query_THD, key_TKD, value_TKD
        first_THD, norm_HT, *_ = _forward(*parts, *_own(borders), 0.0, True, False, scale=scaling)
        out_THD, norm_TH = first_THD.float(), norm_HT.T.contiguous()
        for level, taken in _levels(parts, borders):
            more_NHD, more_HN, *_ = _forward(
                *taken, *_lengths(level.below, level.above), 0.0, False, False, scale=scaling
            )
            place_N, more_NH = level.below.source_N, more_HN.T
            before_NH = norm_TH.index_select(0, place_N)
            whole_NH = torch.logaddexp(before_NH, more_NH)
            merged_NHD = out_THD.index_select(0, place_N)
            merged_NHD *= (before_NH - whole_NH).exp_()[..., None]
            merged_NHD.addcmul_(more_NHD.float(), (more_NH - whole_NH).exp_()[..., None])
            out_THD.index_copy_(0, place_N, merged_NHD)
            norm_TH.index_copy_(0, place_N, whole_NH)
        out_THD = out_THD.to(query_THD.dtype)
        ctx.save_for_backward(*parts, out_THD, norm_TH)
        ctx.borders, ctx.scaling = borders, scaling
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query_THD, key_TKD, value_TKD, out_THD, norm_TH = ctx.saved_tensors
        borders, parts = ctx.borders, (query_THD, key_TKD, value_TKD)
        grad_THD = gradients[0].contiguous()
        # The kernel wants the state of its dropout, which is not there.
        seeds = [torch.zeros(2, dtype=torch.uint64, device=query_THD.device)] * 2
        rest: dict[str, Any] = {"scale": ctx.scaling}
        shares = _backward(
            grad_THD, *parts, out_THD, norm_TH.T.contiguous(), *_own(borders), 0.0, True, *seeds,
            **rest,
        )  # fmt: skip
        found = [share.float() for share in shares]
        for level, taken in _levels(parts, borders):
            place_N = level.below.source_N
            shares = _backward(
                grad_THD.index_select(0, place_N),
                *taken,
                out_THD.index_select(0, place_N),
                norm_TH.index_select(0, place_N).T.contiguous(),
                *_lengths(level.below, level.above),
                0.0,
                False,
                *seeds,
                **rest,
            )
            places = (level.below, level.above, level.above)
            for whole, place, share in zip(found, places, shares, strict=True):
                whole.index_add_(0, place.source_N, share.float())
        return *(one.to(part.dtype) for one, part in zip(found, parts, strict=True)), None, None


def _own(borders: Borders) -> tuple[Tensor, Tensor, int, int]:
    return borders.starts_S1, borders.starts_S1, borders.longest, borders.longest


def _lengths(queries: Sequences, keys: Sequences) -> tuple[Tensor, Tensor, int, int]:
    return queries.starts_S1, keys.starts_S1, queries.longest, keys.longest


def _levels(
    parts: tuple[Tensor, ...], borders: Borders
) -> Iterator[tuple[BranchLevel, tuple[Tensor, ...]]]:
    """Yield the levels of branches, with the queries below them, their keys and values."""
    query_THD, key_TKD, value_TKD = parts
    for level in borders.levels:
        above_N = level.above.source_N
        yield (
            level,
            (
                query_THD.index_select(0, level.below.source_N),
                key_TKD.index_select(0, above_N),
                value_TKD.index_select(0, above_N),
            ),
        )
