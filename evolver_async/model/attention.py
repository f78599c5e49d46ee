"""Attention over packed rows: many sequences in one row, each of which attends to itself alone.

Registered with transformers under the name `NAME`; rows that are not packed are padded on the
right. On a GPU in half precision it is torch's flash kernel for sequences of varying length, on a
CPU `tree_attention`, elsewhere one causal attention per block of sequences of similar length.
Memory grows linearly with the tokens, except for the mask of a sliding window outside of that
kernel.

Shapes: `T` tokens of a packed row, `S` sequences, `B` rows, `H` heads, `D` head size.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from evolver_async.errors import Inconsistency
from evolver_async.model.cpu.tree_attention import attend, fits
from evolver_async.model.rows.borders import Borders
from evolver_async.model.tokenizer import ModelError

NAME = "packed"
FLASH_HEAD = 256  # the kernel takes heads up to this size, in multiples of 8
FLASH_CAPABILITY = (8, 0)
OF_SCORES = ("softcap", "s_aux", "position_bias")  # transformers' names for a cap, sinks, a bias
GQA = "enable_gqa"  # argument of newer kernels: share keys and values among query heads


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

    With `borders` there is one row (B = 1). A query attends to itself and to the tokens before it
    in its sequence, the last `sliding_window` of them if that is given. ModelError if the model
    does more to its scores.
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
    parts_THD = [one[0].transpose(0, 1) for one in (query, key, value)]
    if sliding_window is None and fits(query):
        return attend(parts_THD[0], parts_THD[1], parts_THD[2], borders, scaling)[None], None
    if borders.branches:
        raise Inconsistency("prefix trees are for CPUs and whole contexts")
    compute = _flash if flash_fits(query) else _by_blocks
    return compute(parts_THD, borders, scaling, sliding_window)[None], None


def flash_fits(query: Tensor) -> bool:
    """True if the flash kernel supports the device, precision and head size of this tensor."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and size <= FLASH_HEAD
        and size % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= FLASH_CAPABILITY
    )


def _flash(parts_THD: list[Tensor], borders: Borders, scaling: float, window: int | None) -> Tensor:
    """Compute the attention of query, key and value by the flash kernel."""
    query_THD, key_THD, value_THD = parts_THD
    starts, longest = borders.starts_S1, borders.longest
    shared = query_THD.shape[1] // key_THD.shape[1]
    options: dict[str, Any] = {}
    if GQA in inspect.signature(varlen_attn).parameters:
        options = {GQA: shared > 1}
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
        **options,
    )
    assert isinstance(out, Tensor)
    return out


def _by_blocks(
    parts_THD: list[Tensor], borders: Borders, scaling: float, window: int | None
) -> Tensor:
    """Compute one attention per block, whose sequences are padded to its longest."""
    outs = []
    for block in borders.blocks:
        query, key, value = (block.queries.take(one_THD) for one_THD in parts_THD)
        outs.append(block.queries.real(_causal(query, key, value, scaling, window)))
    return torch.cat(outs).index_select(0, borders.order_T)


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
