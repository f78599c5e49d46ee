"""Attention over packed rows: many sequences in one row, each of which attends to itself alone.

Registered with transformers under the name `NAME`; rows that are not packed are padded on the
right. On a GPU in half precision it is `flash`, on a CPU `tree_attention`, elsewhere one causal
attention per block of sequences of similar length. Memory grows linearly with the tokens, except
for the mask of a sliding window outside of `flash`.

Shapes: `T` tokens of a packed row, `S` sequences, `B` rows, `H` heads, `D` head size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from evolver_async.errors import Inconsistency
from evolver_async.model import flash
from evolver_async.model.cpu import tree_attention
from evolver_async.model.rows.borders import Borders
from evolver_async.model.tokenizer import ModelError

NAME = "packed"
OF_SCORES = ("softcap", "s_aux", "position_bias")  # transformers' names for a cap, sinks, a bias


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
    **others: object,
) -> tuple[Tensor, None]:
    """Compute causal attention with the signature that transformers calls: [B, H, T, D] to
    [B, T, H, D].

    With `borders` there is one row (B = 1), or this rank's range of it. A query attends to itself
    and to the tokens before it in its sequence, the last `sliding_window` of them if that is given.
    ModelError if the model does more to its scores.
    """
    if attention_mask is not None or dropout:
        raise Inconsistency("packed attention takes neither a mask nor dropout")
    for name in OF_SCORES:
        if others.get(name) is not None:
            raise ModelError(f"its attention has {name}")
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if borders is None:
        return _causal(query, key, value, scaling, sliding_window).transpose(1, 2), None
    query_THD, key_THD, value_THD = (one[0].transpose(0, 1) for one in (query, key, value))
    context = borders.context
    if context is not None:
        whole = context.heads(query_THD, key_THD, value_THD, borders.starts[-1])
        query_THD, key_THD, value_THD = whole
    if borders.branches and (sliding_window is not None or not takes_trees(query)):
        raise Inconsistency("prefix trees are for whole contexts and the kernels that take them")
    if flash.fits(query):
        out_THD = flash.attend(query_THD, key_THD, value_THD, borders, scaling, sliding_window)
    elif tree_attention.fits(query) and sliding_window is None:
        out_THD = tree_attention.attend(query_THD, key_THD, value_THD, borders, scaling)
    else:
        parts_THD = [query_THD, key_THD, value_THD]
        out_THD = _by_blocks(parts_THD, borders, scaling, sliding_window)
    if context is not None:
        out_THD = context.tokens(out_THD)
    return out_THD[None], None


def takes_trees(query: Tensor) -> bool:
    """True if there is a kernel for trees on the device and in the precision of this tensor."""
    return flash.fits(query) or tree_attention.fits(query)


def _by_blocks(
    parts_THD: list[Tensor], borders: Borders, scaling: float, window: int | None
) -> Tensor:
    """Compute one attention per block, whose sequences are padded to its longest."""
    outs = []
    for block in borders.calls.blocks:
        query, key, value = (block.queries.take(one_THD) for one_THD in parts_THD)
        outs.append(block.queries.real(_causal(query, key, value, scaling, window)))
    return torch.cat(outs).index_select(0, borders.calls.order_T)


def _causal(
    query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, scaling: float, window: int | None
) -> Tensor:
    """Compute the causal attention of every row; no token attends to padding on its right."""
    shared = query_BHTD.shape[1] // key_BHTD.shape[1]
    if shared > 1:
        key_BHTD = key_BHTD.repeat_interleave(shared, 1)
        value_BHTD = value_BHTD.repeat_interleave(shared, 1)
    tokens, mask = query_BHTD.shape[2], None
    if window is not None and window < tokens:
        positions = torch.arange(tokens, device=query_BHTD.device)
        distance = positions[:, None] - positions
        mask = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(
        query_BHTD, key_BHTD, value_BHTD, mask, is_causal=mask is None, scale=scaling
    )


AttentionInterface.register(NAME, packed_attention)
