"""Layers of a decoder that torch compiles, and those that the backward pass computes again."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from evolver_async.model.attention import NAME as PACKED
from evolver_async.model.attention import packed_attention
from evolver_async.model.cpu import lean
from evolver_async.model.tokenizer import ModelError

PLACE = "TORCHINDUCTOR_CACHE_DIR"
CACHE = "~/.cache/evolver_async/compiled"  # code of earlier starts
VARIANTS = 64  # of the compiled code of one kind of layer: gradients, frozen weights, windows


def keep_code() -> None:
    """Let torch keep compiled code where no other user writes, unless its variable says where.

    It runs what it finds there, and its own place is in a directory that is everybody's. Importing
    parts of torch sets the variable.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes seconds

    if os.environ.get(PLACE) in (None, default_cache_dir()):
        os.environ[PLACE] = str(Path(CACHE).expanduser())


def compile_layers(model: nn.Module) -> None:
    """Let torch compile the decoder's layers at their first passes; equal ones share the code.

    Attention stays as it is. A copy of the model does the same. Call it before `checkpoint_layers`.
    ModelError if the model has no layers that can.
    """
    layers = _decoder_layers(model, "learner.compile")
    keep_code()
    torch._dynamo.config.recompile_limit = VARIANTS
    # Its layout of a row is data, not code, and its passes have gradients of their own.
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
    compiled: dict[type[nn.Module], Callable[..., Any]] = {}
    for layer in layers:
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = torch.compile(kind.forward, dynamic=True)
        layer.forward = partial(compiled[kind], layer)
        setattr(layer, lean.COMPILED, True)


def check_compiler(device: torch.device | str) -> None:
    """Raise ModelError if torch cannot compile for a device, where it needs a compiler of C++."""
    keep_code()
    try:
        torch.compile(torch.neg)(torch.zeros(2, device=device))
    except Exception as error:
        why = str(error).partition("\n")[0]
        needs = f"learner.compile: torch cannot compile for {device}, which needs a C++ compiler"
        raise ModelError(f"{needs} (gcc, g++): {why}") from error


def checkpoint_layers(model: nn.Module, *, offload: bool = False) -> None:
    """Keep only the input of each decoder layer; recompute the rest in the backward pass.

    `offload`: the inputs are kept in host memory, pinned, if the model is on a GPU. Gradients stay
    bitwise equal; a copy of the model does the same. ModelError if the model has no layers that
    can.
    """
    for layer in _decoder_layers(model, "learner.gradient_checkpointing"):
        # Models are always in evaluation mode: no random numbers are drawn that could differ.
        layer.forward = partial(
            _offloaded if offload else checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        setattr(layer, lean.RECOMPUTED, True)


def _offloaded(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Call `checkpoint`, with the tensors that it keeps on the host."""
    with save_on_cpu(pin_memory=inputs[0].is_cuda):
        return checkpoint(forward, *inputs, **options)


def _decoder_layers(model: nn.Module, key: str) -> list[nn.Module]:
    """Return the layers of which each is computed as a whole. ModelError, with the key, if none."""
    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(f"{key}: must be false, as {type(model).__name__} has no decoder layers")
    return [*layers]
