"""Attention over packed rows on a CPU, trees of sequences with a common beginning included.

torch's flash kernel computes the attention of every span to itself and to the branches above it
that are copied for it, and the attention of all tokens below a far branch to that branch. Softmax
parts over different keys are merged by their normalisers; given the merged output and normaliser,
the kernel's backward pass of each part returns its share of the gradient. Scores exist within a
call of the kernel alone.

Shapes: `T` tokens of a packed row, `R` rows of a block, `L` their length, `H` heads (`K` of keys
and values), `D` head size.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from evolver_async.model.rows.borders import Block, Borders

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def fits(query: Tensor) -> bool:
    """True if the kernel supports the device and precision of this tensor."""
    return query.device.type == "cpu" and query.dtype == torch.float32


def attend(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, borders: Borders, scaling: float
) -> Tensor:
    """Compute the attention of a packed row, [T, H, D]."""
    shared = query_THD.shape[1] // key_TKD.shape[1]
    if shared > 1:
        key_TKD = key_TKD.repeat_interleave(shared, 1)
        value_TKD = value_TKD.repeat_interleave(shared, 1)
    out = TreeAttention.apply(query_THD, key_TKD, value_TKD, borders, scaling)
    assert isinstance(out, Tensor)
    return out


class TreeAttention(torch.autograd.Function):
    """Attention of tokens to their segment, up to themselves, and to all segments above it."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THD: Tensor,
        borders: Borders,
        scaling: float,
    ) -> Tensor:
        parts = query_THD, key_THD, value_THD
        out_THD = query_THD.new_empty(query_THD.shape)
        norm_TH = query_THD.new_empty(query_THD.shape[:2], dtype=torch.float32)
        for block in borders.calls.blocks:
            rows = block.queries
            out_RHLD, norm_RHL = _forward(*_taken(block, parts), **_masked(block), scale=scaling)
            out_THD.index_copy_(0, rows.source_T, rows.real(out_RHLD))
            norm_TH.index_copy_(0, rows.source_T, rows.real(norm_RHL[..., None])[..., 0])
        for below, *taken in _branches(parts, borders):
            out_1HLD, norm_1HL = _forward(*taken, 0.0, False, scale=scaling)
            _merge(out_THD[below], norm_TH[below], out_1HLD[0].transpose(0, 1), norm_1HL[0].T)
        ctx.save_for_backward(*parts, out_THD, norm_TH)
        ctx.borders, ctx.scaling = borders, scaling
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query_THD, key_THD, value_THD, out_THD, norm_TH = ctx.saved_tensors
        parts = query_THD, key_THD, value_THD
        grad_THD = gradients[0]
        found = [torch.zeros(part.shape, dtype=part.dtype) for part in parts]
        for block in ctx.borders.calls.blocks:
            rows = block.queries
            # Padding has no gradient, and an infinite norm: its probabilities are 0.
            grad_RHLD = rows.spread(grad_THD, 0.0)
            norm_RHL = rows.spread(norm_TH[..., None], math.inf)[..., 0]
            taken = grad_RHLD, *_taken(block, parts), rows.take(out_THD), norm_RHL
            shares = _backward(*taken, **_masked(block), scale=ctx.scaling)
            for whole, of, share_RHLD in zip(
                found, (rows, block.keys, block.keys), shares, strict=True
            ):
                whole.index_add_(0, of.source_T, of.real(share_RHLD))
        for branch, (below, *taken) in zip(
            ctx.borders.calls.far, _branches(parts, ctx.borders), strict=True
        ):
            grad_1HLD, out_1HLD = _heads(grad_THD[below]), _heads(out_THD[below])
            norm_1HL = norm_TH[below].T[None]
            shares = _backward(grad_1HLD, *taken, out_1HLD, norm_1HL, 0.0, False, scale=ctx.scaling)
            above = slice(branch.start, branch.end)
            for whole, place, share in zip(found, (below, above, above), shares, strict=True):
                whole[place] += share[0].transpose(0, 1)
        return *found, None, None


def _taken(block: Block, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of a block's rows, [R, H, L, D]."""
    query, key, value = parts
    return block.queries.take(query), block.keys.take(key), block.keys.take(value)


def _masked(block: Block) -> dict[str, Any]:
    return {"dropout_p": 0.0, "is_causal": block.mask is None, "attn_mask": block.mask}


def _branches(
    parts: tuple[Tensor, ...], borders: Borders
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield the range of the tokens below each far branch, their queries, its keys and values."""
    query, key, value = parts
    for branch in borders.calls.far:
        below, above = slice(branch.end, branch.last), slice(branch.start, branch.end)
        yield below, _heads(query[below]), _heads(key[above]), _heads(value[above])


def _heads(part_THD: Tensor) -> Tensor:
    """Return a row as a batch of one, [1, H, T, D]."""
    return part_THD.transpose(0, 1)[None]


def _merge(out_THD: Tensor, norm_TH: Tensor, more_THD: Tensor, more_TH: Tensor) -> None:
    """Add the attention to other keys in place; norms are logarithms of the softmax's sums."""
    whole_TH = torch.logaddexp(norm_TH, more_TH)
    out_THD.mul_((norm_TH - whole_TH).exp_()[..., None])
    out_THD.addcmul_(more_THD, (more_TH - whole_TH).exp_()[..., None])
    norm_TH.copy_(whole_TH)
