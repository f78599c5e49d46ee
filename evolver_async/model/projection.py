"""Projection of hidden states onto the vocabulary, and what is read of its logits, in chunks.

The logits of a chunk of positions exist once in the forward pass, and again in the backward pass,
which computes them anew but for those of the last chunk. Their gradient is written in closed form,
and those of the weights are added in place, for a head in a short type in float32.

Shapes: `N` positions, `D` hidden size, `V` vocabulary, `K` likeliest tokens, `M` masks, `W` bytes
of one mask (ceil(V / 8)).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from evolver_async.model.logit_chunks import chunk_tokens
from evolver_async.model.rows.context import ContextGroup

# In place of a masked logit. Not -inf: an entropy would add 0 · inf.
MASKED = -1e30


class TokenMasks(NamedTuple):
    """Masks of positions whose tokens obey a grammar.

    mask_N int64: the position's row of allowed_MW, -1 if all tokens are allowed. allowed_MW uint8:
    one bit per token, the lowest first.
    """

    mask_N: Tensor
    allowed_MW: Tensor

    def of(self, mask_N: Tensor) -> "TokenMasks":
        """Return the masks of other positions."""
        return TokenMasks(mask_N, self.allowed_MW)


def masked(logits_NV: Tensor, mask_N: Tensor, allowed_MW: Tensor) -> Tensor:
    """Replace the logits of tokens that `TokenMasks` exclude by `MASKED`. Differentiable."""
    ruled_R = (mask_N >= 0).nonzero().squeeze(-1)
    if not len(ruled_R):
        return logits_NV
    allowed_RW = allowed_MW[mask_N[ruled_R]]
    bit_8 = torch.arange(8, dtype=torch.uint8, device=allowed_RW.device)
    allowed_RV = (allowed_RW[..., None] >> bit_8 & 1).flatten(1)[:, : logits_NV.shape[1]].bool()
    return logits_NV.index_put((ruled_R,), logits_NV[ruled_R].where(allowed_RV, MASKED))


class Readout(Protocol):
    """Numbers of each position that are read of its logits, some positions (`rows`) at a time."""

    def prepare(self, logits_NV: Tensor, rows: slice) -> Tensor:
        """Return what the other two methods read; it may overwrite the logits."""
        ...

    def values(self, prepared_NV: Tensor, rows: slice) -> tuple[Tensor, ...]:
        """Return float32[N] of each kind."""
        ...

    def gradient(
        self,
        prepared_NV: Tensor,
        rows: slice,
        by_values: Sequence[Tensor | None],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the gradient by the logits, in `dtype`; it may overwrite what was prepared.

        by_values: the gradients by each kind of values, None without one.
        """
        ...


@dataclass(frozen=True)
class TargetReadout:
    """Log-probs of targets_N int64, and entropies or 0; settings as of `policy.token_logprobs`.

    With p the softmax of z / T: by z, log p_t has the gradient (1_t - p) / T and the entropy H has
    -p (log p + H) / T.
    """

    targets_N: Tensor
    temperature: float
    with_entropy: bool
    entropy_top_k: int
    masks: TokenMasks | None

    def prepare(self, logits_NV: Tensor, rows: slice) -> Tensor:
        if self._heat != 1.0:
            logits_NV = logits_NV.float().div_(self._heat)
        if self.masks is not None:
            mask_N, allowed_MW = self.masks
            logits_NV = masked(logits_NV, mask_N[rows], allowed_MW)
        return logits_NV

    def values(self, prepared_NV: Tensor, rows: slice) -> tuple[Tensor, ...]:
        logps_NV = prepared_NV.log_softmax(-1, dtype=torch.float32)
        picked_N = logps_NV.gather(-1, self.targets_N[rows, None]).squeeze(-1)
        if not self.with_entropy:
            return picked_N, torch.zeros_like(picked_N)
        return picked_N, _entropy(logps_NV)

    def gradient(
        self,
        prepared_NV: Tensor,
        rows: slice,
        by_values: Sequence[Tensor | None],
        dtype: torch.dtype,
    ) -> Tensor:
        target_N1 = self.targets_N[rows, None]
        one_N1 = torch.ones_like(target_N1, dtype=torch.float32)
        by_logprob_N1, by_entropy_N1 = (
            0 * one_N1 if one is None else one[:, None] / self._heat for one in by_values
        )
        if by_values[1] is None or not self.with_entropy:
            gap_NV = prepared_NV.softmax(-1, dtype=torch.float32)
            gap_NV.scatter_add_(1, target_N1, -one_N1)
            found_NV = gap_NV if dtype == gap_NV.dtype else torch.empty_like(gap_NV, dtype=dtype)
            return torch.mul(gap_NV, -by_logprob_N1, out=found_NV)
        logps_NV = prepared_NV.log_softmax(-1, dtype=torch.float32)
        if self.entropy_top_k:
            top_NK, token_NK = logps_NV.topk(min(self.entropy_top_k, logps_NV.shape[1]))
            top_NK = top_NK.log_softmax(-1)
            by_top_NK = -by_entropy_N1 * top_NK.exp() * (top_NK + _entropy(top_NK)[:, None])
            found_NV = logps_NV.exp_().mul_(-by_logprob_N1).scatter_add_(1, token_NK, by_top_NK)
        else:
            constant_N1 = by_logprob_N1 + by_entropy_N1 * _entropy(logps_NV)[:, None]
            probs_NV = logps_NV.exp()
            found_NV = torch.addcmul(-constant_N1, logps_NV, -by_entropy_N1, out=logps_NV)
            found_NV.mul_(probs_NV)
        return found_NV.scatter_add_(1, target_N1, by_logprob_N1).to(dtype)

    @property
    def _heat(self) -> float:
        return self.temperature or 1.0  # log-probs of greedy decoding are those of temperature 1


def _entropy(logps_NV: Tensor) -> Tensor:
    return -logps_NV.exp().mul_(logps_NV).sum(-1)


def read_out(
    head: nn.Module,
    hidden_ND: Tensor,
    readout: Readout,
    chunk: int,
    *,
    heads: int = 1,
    context: ContextGroup | None = None,
) -> tuple[Tensor, ...]:
    """Return the values of a readout behind hidden states, at least one; float32[N] of each kind.

    chunk: as `learner.logprob_chunk`; `heads`: number of those whose logits exist at once.
    `context`: ranks that call it with the same positions, each of which projects a share of them.
    Differentiable.
    """
    assert isinstance(head, nn.Linear)
    tokens = chunk_tokens(chunk, heads * head.out_features, gpu=hidden_ND.is_cuda)
    weights, count = (head.weight, head.bias), len(hidden_ND)
    if context is None or count < context.count:
        found = _Chunks.apply(hidden_ND, *weights, readout, tokens, 0)
        assert isinstance(found, tuple)
        return found
    own = context.own(count)
    found = _Chunks.apply(hidden_ND[own], *weights, readout, tokens, own.start)
    assert isinstance(found, tuple)
    return context.gathered(torch.stack(found, 1), context.lengths(count)).unbind(1)


class _Chunks(torch.autograd.Function):
    """Readout of a projection, which saves no logits but those of the last chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        readout: Readout,
        chunk: int,
        first: int,
    ) -> tuple[Tensor, ...]:
        """`first`: the readout's number of the first of these positions."""
        count, parts = len(hidden_ND), list[tuple[Tensor, ...]]()
        ctx.chunks = [
            (slice(at, end), slice(first + at, first + end))
            for at in range(0, count, chunk)
            for end in [min(at + chunk, count)]
        ]
        ctx.kept_NV = None
        for own, rows in ctx.chunks:
            ctx.kept_NV = None  # before the next chunk's logits exist
            ctx.kept_NV = readout.prepare(F.linear(hidden_ND[own], weight_VD, bias_V), rows)
            parts.append(readout.values(ctx.kept_NV, rows))
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V)
        ctx.readout = readout
        ctx.set_materialize_grads(False)
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_values: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V = ctx.saved_tensors
        for_hidden, for_weight, for_bias, *_ = ctx.needs_input_grad
        dtype = weight_VD.dtype
        wide = torch.promote_types(dtype, torch.float32) if len(ctx.chunks) > 1 else dtype
        by_hidden_ND = torch.empty_like(hidden_ND) if for_hidden else None
        by_weight_VD = None
        by_bias_V = weight_VD.new_zeros(len(weight_VD), dtype=wide) if for_bias else None
        for own, rows in reversed(ctx.chunks):
            prepared_NV, ctx.kept_NV = ctx.kept_NV, None
            if prepared_NV is None:
                logits_NV = F.linear(hidden_ND[own], weight_VD, bias_V)
                prepared_NV = ctx.readout.prepare(logits_NV, rows)
                del logits_NV
            given = [None if one is None else one[own] for one in by_values]
            by_logits_NV = ctx.readout.gradient(prepared_NV, rows, given, dtype)
            del prepared_NV
            if by_hidden_ND is not None:
                by_hidden_ND[own] = by_logits_NV @ weight_VD
            if by_bias_V is not None:
                by_bias_V += by_logits_NV.sum(0, dtype=wide)
            if for_weight and by_weight_VD is None:
                by_weight_VD = (by_logits_NV.T @ hidden_ND[own]).to(wide)
            elif by_weight_VD is not None and wide == dtype:
                by_weight_VD.addmm_(by_logits_NV.T, hidden_ND[own])
            elif by_weight_VD is not None:
                by_weight_VD += by_logits_NV.T @ hidden_ND[own]
            del by_logits_NV  # before the next chunk's logits exist
        weights = (None if one is None else one.to(dtype) for one in (by_weight_VD, by_bias_V))
        return by_hidden_ND, *weights, None, None, None
