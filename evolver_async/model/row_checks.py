"""Checks that a model can take packed rows, and rows whose shared beginnings are computed once."""

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from evolver_async.model.cpu.products import is_short
from evolver_async.model.policy import hidden_states
from evolver_async.model.rows.borders import Borders
from evolver_async.model.tokenizer import ModelError

TOLERANCE = 1e-3  # relative difference of packed hidden states
SHORT_TOLERANCE = 0.1  # of a short type: kernels round differently in every layer


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> None:
    """Raise ModelError if the model cannot run packed rows or mixes their sequences.

    Layers that are no plain attention are refused by their kind: one with a state (linear
    attention, convolutions) carries it over the borders, in a trained model perhaps less than a
    short type rounds, and one that selects what it attends to does so beyond a length only.
    """
    refused = f"learner.packing: must be false, as {type(model).__name__}"
    if others := layer_kinds(model) - {"full_attention", "sliding_attention"}:
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


def layer_kinds(model: PreTrainedModel) -> set[str]:
    """Return the kinds of layers that the model's configuration names; none if it names none."""
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ())


def check_prefix_trees(model: PreTrainedModel, device: torch.device) -> None:
    """Raise ModelError if prefix trees cannot act: they need float32, a CPU, whole contexts."""
    partial = has_window(model)
    if device.type != "cpu" or model.dtype != torch.float32 or partial:
        why = "a layer sees a part of its context" if partial else "they need float32 on a CPU"
        raise ModelError(f"learner.prefix_trees: must not be always, as {why}")


def has_window(model: PreTrainedModel) -> bool:
    """True if a layer attends through a sliding window, or otherwise to a part of its context.

    Some configurations name the kind of each layer (Qwen), others have one for all (Mistral), and
    some models keep it in their attention.
    """
    config = model.config.get_text_config()
    if kinds := layer_kinds(model):
        return kinds != {"full_attention"}
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return True
    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    return any(
        getattr(part, "sliding_window", None) for layer in layers for part in layer.children()
    )
