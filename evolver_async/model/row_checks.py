"""Checks that a model can take packed rows, and rows whose shared beginnings are computed once."""

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from evolver_async.model import flash
from evolver_async.model.attention import packed_attention, takes_trees
from evolver_async.model.cpu.products import is_short
from evolver_async.model.policy import hidden_states
from evolver_async.model.positions import rotation_kinds
from evolver_async.model.rows.borders import Borders
from evolver_async.model.rows.prefix_trees import merge
from evolver_async.model.tokenizer import ModelError

TOLERANCE = 1e-3  # relative difference of packed hidden states
SHORT_TOLERANCE = 0.1  # of a short type: kernels round differently in every layer
ATTENTION = {"full_attention", "sliding_attention", "attention"}  # kinds of layers
BY_LENGTH = ("dynamic", "longrope", "su")  # rotations that depend on the longest position
SHARED = (19, 33, 33, 40)  # tokens at the beginning of rows that check the attention of a tree


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> None:
    """Raise ModelError if the model cannot run packed rows or mixes their sequences.

    Layers that are no plain attention are refused by their kind: one with a state (linear
    attention, convolutions) carries it over the borders, in a trained model perhaps less than a
    short type rounds, and one that selects what it attends to does so beyond a length only.
    """
    refused = f"learner.packing: must be false, as {type(model).__name__}"
    if others := other_layers(model.config):
        raise ModelError(f"{refused} has layers of {', '.join(sorted(others))}")
    lengths = [3, 1, 5]
    tokens_1T = torch.arange(sum(lengths), device=model.device)[None] % model.config.vocab_size
    parts = tokens_1T.split(lengths, dim=1)
    alone_1TD = torch.cat([hidden_states(model, one_1T) for one_1T in parts], 1).float()
    try:
        packed_1TD = hidden_states(model, tokens_1T, Borders.of(lengths, model.device)).float()
    except Exception as error:  # of any kind: attention of its own takes no packed rows
        reason = " ".join(str(error).split())
        raise ModelError(f"{refused} cannot run packed rows: {reason}") from error
    difference = float((packed_1TD - alone_1TD).norm() / alone_1TD.norm())
    exact = model.dtype == torch.float32 and not is_short(model)
    if not difference <= (TOLERANCE if exact else SHORT_TOLERANCE):
        raise ModelError(f"{refused} mixes packed sequences")


def other_layers(config: PretrainedConfig) -> set[str]:
    """Return the kinds of layers that are no plain attention; none if a model names no kinds."""
    return _layer_kinds(config) - ATTENTION


def _layer_kinds(config: PretrainedConfig) -> set[str]:
    text = config.get_text_config()
    names = ("layer_types", "layers_block_type")
    return {kind for name in names for kind in getattr(text, name, None) or ()}


def check_context(model: PreTrainedModel, ranks: int) -> None:
    """Raise ModelError if `ranks` cannot compute rows together: each needs equally many heads, and
    rotations that are the same whatever the row's length, of which each sees a part."""
    if ranks == 1:
        return
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads % ranks:
        divided = f"must divide the attention heads of {type(model).__name__} ({heads})"
        raise ModelError(f"learner.context_parallel: {divided}, is {ranks}")
    if by_length := rotation_kinds(config) & set(BY_LENGTH):
        kind = f"{type(model).__name__} rotates by the length of a row ({', '.join(by_length)})"
        raise ModelError(f"learner.context_parallel: must be 1, as {kind}")


def check_prefix_trees(model: PreTrainedModel, *, gpu: bool) -> None:
    """Raise ModelError if prefix trees cannot act: they need float32 on a CPU, or half precision
    on a GPU, and whole contexts."""
    if has_window(model):
        why = "a layer sees a part of its context"
    elif (gpu and model.dtype in flash.HALF) or (not gpu and model.dtype == torch.float32):
        return
    else:
        why = "they need float32 on a CPU, or half precision on a GPU"
    raise ModelError(f"learner.prefix_trees: must not be always, as {why}")


def check_tree_attention(model: PreTrainedModel, device: torch.device) -> None:
    """Raise ModelError if the attention of a tree on this device, in the precision of the model, is
    not that of its rows, by outputs and gradients, or if no kernel takes the model's heads."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rows = [np.append(np.arange(shared), 50 + place) for place, shared in enumerate(SHARED)]
    merged = merge(rows, device)
    laid_A = torch.from_numpy(merged.place_A).to(device)
    drawn = torch.Generator().manual_seed(0)

    def draw(count: int, tokens: int) -> Tensor:
        part = torch.randn(1, count, tokens, size, generator=drawn)
        return part.to(device, model.dtype)

    keys = getattr(config, "num_key_value_heads", None) or heads
    parts = [draw(count, len(merged.source_T)) for count in (heads, keys, keys)]
    weights = draw(heads, len(laid_A)).transpose(1, 2)
    refused = "learner.prefix_trees: must not be always, as"
    if not takes_trees(parts[0]):
        raise ModelError(f"{refused} the kernel takes no heads of {size}, or not on this GPU")
    found: list[Tensor] = []
    for tree in (True, False):
        given = [part.clone().requires_grad_() for part in parts]
        borders = merged.borders if tree else Borders.of([*map(len, rows)], device)
        shown = given if tree else [part.index_select(2, laid_A) for part in given]
        query, key, value = shown
        out, _ = packed_attention(
            model, query, key, value, None, scaling=size**-0.5, borders=borders
        )
        out = out.index_select(1, laid_A) if tree else out
        (out * weights).sum().backward()
        grads = [part.grad for part in given if part.grad is not None]
        found.append(torch.cat([one.detach().float().flatten() for one in (out, *grads)]))
    difference = float((found[0] - found[1]).norm() / found[1].norm())
    if not difference <= SHORT_TOLERANCE:
        raise ModelError(f"{refused} its attention differs from that of rows by {difference:.2g}")


def has_window(model: PreTrainedModel) -> bool:
    """True if a layer attends through a sliding window, or otherwise to a part of its context.

    Some configurations name the kind of each layer (Qwen), others have one for all (Mistral), and
    some models keep it in their attention.
    """
    config = model.config.get_text_config()
    if kinds := _layer_kinds(config):
        return kinds != {"full_attention"}
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return True
    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    return any(
        getattr(part, "sliding_window", None) for layer in layers for part in layer.children()
    )
