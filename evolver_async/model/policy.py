"""The policy: loading a causal language model, its log-probs, its weights as named tensors.

Works on any Hugging Face causal-LM directory; the preset made from scratch is in `tiny.py`, and
nothing here can tell the two apart. Actors and learner share this file, so that both sides mean the
same by "log-prob". How tokens are sampled is in `actors/engines`, what is trained in `learner`.

Shapes: `B` sequences, `T` tokens, `N` selected positions, `D` hidden size, `V` vocabulary.
"""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from evolver_async.model.attention import NAME as PACKED
from evolver_async.model.attention import Borders
from evolver_async.model.tiny import make_tiny
from evolver_async.model.tokenizer import (
    TOKENIZER_FILES,
    ModelError,
    load_tokenizer,
    tokenizer_hash,
)

__all__ = [
    "ModelError",
    "check_packing",
    "checkpoint_layers",
    "decode",
    "export",
    "hidden_states",
    "load_model",
    "load_state",
    "load_tokenizer",
    "make_tiny",
    "split_model",
    "state_tensors",
    "token_logprobs",
    "tokenizer_hash",
]

logging.disable_progress_bar()  # transformers' own would tear the run's live panel

APART = {torch.float32: 1e-3}  # of hidden states: how far packed ones may be off
APART_SHORT = 0.1  # in a short type: kernels round differently, layer after layer
LOGITS = 1 << 25  # of one chunk at most: 128 MiB in float32, five times that at the peak


def load_model(
    directory: str | Path, *, dtype: str, device: str, attention: str = "sdpa"
) -> PreTrainedModel:
    """A causal language model in evaluation mode; ModelError, naming the file, for a bad directory.

    Only models whose logits are a plain projection of the last hidden states are taken, because
    log-probs are computed from the hidden states in chunks. Device "auto" is CUDA, if there.
    """
    root = Path(directory)
    if not (root / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json")
    if not [*root.glob("*.safetensors"), *root.glob("*.bin")]:
        raise ModelError(f"{directory} has no weights (*.safetensors)")
    try:
        config = AutoConfig.from_pretrained(root, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            root,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{directory} is not a causal language model: {error}") from error
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    nn.Module.to(model, device).eval()
    decoder, head = split_model(model)
    tokens_BT = torch.arange(4, device=model.device)[None]
    with torch.no_grad():
        whole = model(input_ids=tokens_BT, use_cache=False).logits
        parts = head(decoder(input_ids=tokens_BT, use_cache=False).last_hidden_state)
    if not torch.allclose(whole.float(), parts.float(), atol=1e-3, rtol=1e-2):
        raise ModelError(
            f"{directory}: {type(model).__name__} transforms its logits after the head"
        )
    return model


def split_model(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The part that computes hidden states, and the projection to the vocabulary."""
    assert isinstance(model, PreTrainedModel)
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no language-model head")
    return model.base_model, head


def hidden_states(model: nn.Module, tokens_BT: Tensor, borders: Borders | None = None) -> Tensor:
    """The last hidden states of rows padded on the right, hidden_BTD. Differentiable.

    With `borders` they are of one packed row (B = 1).
    """
    return decode(split_model(model)[0], tokens_BT, borders)


def decode(decoder: nn.Module, tokens_BT: Tensor, borders: Borders | None = None) -> Tensor:
    """`hidden_states` by a model's first part alone; packed rows switch its attention for good."""
    packed = {}
    if borders is not None:
        config = getattr(decoder, "config")  # noqa: B009 (a Module says any attribute is a Tensor)
        config._attn_implementation = PACKED
        packed = {"position_ids": borders.position_1T, "borders": borders}
    return decoder(input_ids=tokens_BT, use_cache=False, **packed).last_hidden_state


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> None:
    """ModelError where the model does not keep the sequences of a packed row apart."""
    lengths = [3, 1, 5]
    tokens_1T = torch.arange(sum(lengths), device=model.device)[None] % model.config.vocab_size
    parts = tokens_1T.split(lengths, dim=1)
    alone_1TD = torch.cat([hidden_states(model, one_1T) for one_1T in parts], 1).float()
    packed_1TD = hidden_states(model, tokens_1T, Borders.of(lengths, model.device)).float()
    off = float((packed_1TD - alone_1TD).norm() / alone_1TD.norm())
    if not off <= APART.get(model.dtype, APART_SHORT):
        raise ModelError(
            f"learner.packing: {type(model).__name__} does not keep packed sequences apart"
        )


def checkpoint_layers(model: nn.Module) -> None:
    """Keep only what goes into each decoder layer and compute the rest again in the backward pass.

    Gradients stay as they are, bit by bit; a copy of the model does the same. ModelError where the
    model has no layers that can.
    """
    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"learner.gradient_checkpointing: {type(model).__name__} has no layers to recompute"
        )
    for layer in layers:
        # Models are in evaluation mode throughout: no random numbers are drawn that could differ.
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def token_logprobs(
    model: nn.Module,
    tokens_BT: Tensor,
    mask_BT: Tensor,
    temperature: float = 1.0,
    chunk: int = 4096,
    *,
    select_BT: Tensor | None = None,
    hidden_BTD: Tensor | None = None,
    borders: Borders | None = None,
    with_entropy: bool = False,
    entropy_top_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each selected token given the tokens before it, and the entropy it was drawn at.

    tokens_BT int; mask_BT true on real tokens, which stand on the left (padding on the right, so
    causal attention alone keeps it out of sight and positions are column numbers). Returns float32
    logprobs_BT and entropy_BT (zero unless `with_entropy`); index t is about token t, index 0 and
    everything not selected is 0. `select_BT` defaults to the real tokens. Only selected positions
    are projected to the vocabulary, `chunk` at a time and never more than `LOGITS` values, and
    chunks are recomputed in the backward pass: memory for logits is bounded, whatever the
    vocabulary and the number of tokens. Temperature 0 is greedy decoding: log-probs are
    then those of temperature 1. `entropy_top_k` > 0 leaves the entropy's value as it is and
    gives it the gradient of the entropy among the k likeliest tokens (AEnt, arXiv 2509.03493), so
    that a bonus on it keeps alternatives alive without raising every token of the vocabulary.
    `hidden_BTD`: the rows' `hidden_states`, where they are known already; else `borders` says
    whether they are packed (no sequence's first token may be selected then). Differentiable.
    """
    select_BT = mask_BT.bool() if select_BT is None else select_BT.bool()
    rows_N, columns_N = select_BT[:, 1:].nonzero(as_tuple=True)
    _, head = split_model(model)
    if hidden_BTD is None:
        hidden_BTD = hidden_states(model, tokens_BT, borders)
    hidden_ND = hidden_BTD[rows_N, columns_N]
    targets_N = tokens_BT[rows_N, columns_N + 1].long()

    blank_BT = torch.zeros(tokens_BT.shape, dtype=torch.float32, device=tokens_BT.device)
    if not len(targets_N):
        # Still a function of the weights: a micro-batch without actions must not break backward().
        return blank_BT + 0.0 * hidden_BTD.float().sum(), blank_BT
    assert isinstance(model, PreTrainedModel)
    chunk = max(1, min(chunk, LOGITS // model.config.vocab_size))
    # A single chunk is as large as memory may get anyway; recomputing it would only cost time.
    again = torch.is_grad_enabled() and len(targets_N) > chunk
    project = partial(
        _project, _summing(head) if again else head, temperature, with_entropy, entropy_top_k
    )
    parts = [
        checkpoint(project, *pieces, use_reentrant=False, preserve_rng_state=False)
        if again
        else project(*pieces)
        for pieces in zip(hidden_ND.split(chunk), targets_N.split(chunk), strict=True)
    ]
    place = rows_N, columns_N + 1
    logprobs_N, entropy_N = (torch.cat(part) for part in zip(*parts, strict=True))
    return blank_BT.index_put(place, logprobs_N), blank_BT.index_put(place, entropy_N)


class _Wide(torch.autograd.Function):
    """Where chunks' gradients of weights in a short type meet, to be added in float32."""

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor) -> Tensor:
        """Of the weights' shape; holds no memory, as nobody reads it."""
        ctx.dtype = weight_VD.dtype
        return torch.zeros((), dtype=torch.float32, device=weight_VD.device).expand_as(weight_VD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].to(ctx.dtype)


class _Linear(torch.autograd.Function):
    """A projection, the gradient of whose weights goes to `_Wide` in their place."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, _: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD)
        return F.linear(hidden_ND, weight_VD, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor, Tensor | None]:
        hidden_ND, weight_VD = ctx.saved_tensors
        (gradient_NV,) = gradients
        wide_VD = (gradient_NV.T @ hidden_ND).float()
        bias = gradient_NV.sum(0) if ctx.needs_input_grad[3] else None
        return gradient_NV @ weight_VD, None, wide_VD, bias


def _summing(head: nn.Module) -> Callable[[Tensor], Tensor]:
    """A projection that is computed chunk by chunk: its gradient is rounded to its type once."""
    assert isinstance(head, nn.Linear)
    weight_VD, bias = head.weight, head.bias
    if weight_VD.element_size() >= torch.float32.itemsize or not weight_VD.requires_grad:
        return head
    wide_VD = _Wide.apply(weight_VD)
    return lambda hidden_ND: _Linear.apply(hidden_ND, weight_VD.detach(), wide_VD, bias)


def _project(
    head: Callable[[Tensor], Tensor],
    temperature: float,
    with_entropy: bool,
    entropy_top_k: int,
    hidden_ND: Tensor,
    targets_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log-probs of a chunk of targets, and entropies where they are wanted, else 0."""
    logps_NV = _scaled(head(hidden_ND), temperature).log_softmax(-1)
    picked_N = logps_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    if not with_entropy:
        return picked_N, torch.zeros_like(picked_N)
    entropy_N = -(logps_NV.exp() * logps_NV).sum(-1)
    if entropy_top_k:
        size = min(entropy_top_k, logps_NV.shape[-1])
        likeliest_NK = logps_NV.topk(size).values.log_softmax(-1)
        among_N = -(likeliest_NK.exp() * likeliest_NK).sum(-1)
        entropy_N = among_N + (entropy_N - among_N).detach()
    return picked_N, entropy_N


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float()
    return logits if temperature in (0.0, 1.0) else logits / temperature


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights by stable name, tied ones once; views, not copies.

    Where some parameters are trained and others frozen, as under adapters, without the frozen ones.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    if len(frozen) == len(parameters):
        frozen = set()
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in frozen and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


@torch.no_grad()
def load_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights, as `state_tensors` names them, into the model; all of them or, on error, none.

    Raises ModelError naming the tensor that is missing, unknown or of another shape.
    """
    own = state_tensors(model)
    for name in own.keys() ^ tensors.keys():
        raise ModelError(f"weight {name} is {'missing' if name in own else 'unknown'}")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            shapes = f"{list(tensors[name].shape)}, not {list(tensor.shape)}"
            raise ModelError(f"weight {name} has shape {shapes}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def export(model: PreTrainedModel, directory: str | Path, tokenizer_dir: str | Path) -> None:
    """Write the model and the tokenizer of `tokenizer_dir` as one Hugging Face directory."""
    model.save_pretrained(directory)
    for name in TOKENIZER_FILES:
        source = Path(tokenizer_dir) / name
        if source.is_file():
            shutil.copyfile(source, Path(directory) / name)
