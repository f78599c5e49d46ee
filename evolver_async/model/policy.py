"""The policy: loading a causal language model, its log-probs, its weights as named tensors.

It takes any Hugging Face causal-LM directory, also that of the preset of `tiny.py`. Actors and
learner share this file, so that "log-prob" means the same on both sides. Sampling lives in
`actors/engines`, training in `learner`.

Shapes: `B` sequences, `T` tokens, `N` selected positions, `D` hidden size, `V` vocabulary.
"""

import itertools
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from evolver_async.files import follow_umask
from evolver_async.model.attention import NAME as PACKED
from evolver_async.model.cpu import lean
from evolver_async.model.projection import TargetReadout, TokenMasks, read_out
from evolver_async.model.rows.borders import Borders
from evolver_async.model.rows.context import ContextGroup
from evolver_async.model.tiny import make_tiny  # noqa: F401 (the wings take it from here)
from evolver_async.model.tokenizer import (  # noqa: F401 (these, too)
    TOKENIZER_FILES,
    ModelError,
    load_tokenizer,
    tokenizer_hash,
)

logging.disable_progress_bar()  # that of transformers would break the run's live panel

ENLARGED = 1e4  # factor of the logits of a check, far beyond what models cap theirs at


def load_model(directory: str | Path, *, dtype: str, device: str) -> PreTrainedModel:
    """Load a causal language model in evaluation mode. ModelError names the file that is wrong.

    The logits must be a plain projection of the last hidden states, because log-probs are computed
    from the hidden states in chunks, and attention scores uncapped. Device "auto" is CUDA if it is
    available.
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
            attn_implementation="sdpa",
            local_files_only=True,
        )
    except SafetensorError as error:
        raise ModelError(f"{_torn(root)}: is no file of tensors: {error}") from None
    except (OSError, ValueError, KeyError, RecursionError) as error:
        if "scaled_dot_product_attention" in str(error):
            own = "its attention is of its own kind (sinks, a state), which is not trained here"
            raise ModelError(f"{directory}: {own}") from error
        raise ModelError(f"{directory} is not a causal language model: {error}") from error
    if model.config.get_text_config() is not model.config:
        raise ModelError(f"{directory}: {type(model).__name__} is not a model of text alone")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # cuDNN's attention plans anew for every shape on a GPU, and most passes have another one.
    torch.backends.cuda.enable_cudnn_sdp(False)
    nn.Module.to(model, device).eval()
    if model.device.type == "cuda":
        fuse_norms(model)
    _check_plain(model, directory)
    return model


@torch.no_grad()
def fuse_norms(model: nn.Module) -> None:
    """Replace norms by torch's, which are one kernel on a GPU, where these compute the same.

    transformers' move nearly half of the bytes of a layer that products do not. Engine and learner
    both load with them, so that they round alike.
    """
    for name, plain in [*model.named_modules()]:
        weight, eps = getattr(plain, "weight", None), getattr(plain, "variance_epsilon", None)
        if not type(plain).__name__.endswith("RMSNorm") or weight is None or eps is None:
            continue
        fused = nn.RMSNorm(len(weight), eps, device="meta")
        fused.weight = weight
        probe_ND = torch.linspace(-3, 3, 4 * len(weight)).view(4, -1).to(weight)
        # Gemma's add 1 to their weights, for example.
        if torch.allclose(plain(probe_ND), fused(probe_ND), rtol=2e-2, atol=1e-2):
            model.set_submodule(name, fused)


@torch.no_grad()
def _check_plain(model: PreTrainedModel, directory: str | Path) -> None:
    """Raise ModelError unless logits are the head's and attention is a softmax of plain scores.

    Fresh weights give small numbers, at which a soft cap is as good as none: the head's are
    enlarged here. `sdpa` drops the cap of attention scores without an error.
    """
    cap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if cap is not None:
        capped = f"{type(model).__name__} caps its attention scores"
        raise ModelError(f"{directory}: {capped} (attn_logit_softcapping: {cap})")
    decoder, head = split_model(model)
    tokens_BT = torch.arange(4, device=model.device)[None]
    enlarged = head.register_forward_hook(lambda *call: call[-1] * ENLARGED)
    try:
        whole = model(input_ids=tokens_BT, use_cache=False).logits.float()
        parts = head(decoder(input_ids=tokens_BT, use_cache=False).last_hidden_state).float()
    finally:
        enlarged.remove()
    if not torch.allclose(whole, parts, atol=1e-3 * ENLARGED, rtol=1e-2):
        raise ModelError(
            f"{directory}: {type(model).__name__} transforms its logits after the head"
        )


def _torn(root: Path) -> Path:
    """Return the first file of weights that cannot be opened, which the library does not name."""
    for path in sorted(root.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                continue
        except SafetensorError:
            return path
    return root


def split_model(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return the part that computes hidden states, and the projection to the vocabulary."""
    assert isinstance(model, PreTrainedModel)
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no language-model head")
    if model.base_model is model:
        raise ModelError(f"{type(model).__name__} does not name the part before its head")
    return model.base_model, head


def hidden_states(
    model: nn.Module,
    tokens_BT: Tensor,
    borders: Borders | None = None,
    read_K: Tensor | None = None,
) -> Tensor:
    """Compute the last hidden states of rows padded on the right, hidden_BTD. Differentiable.

    With `borders` there is one packed row (B = 1). read_K: places in the flattened tokens_BT, for
    hidden_KD, those that are read.
    """
    return decode(split_model(model)[0], tokens_BT, borders, read_K)


def decode(
    decoder: nn.Module,
    tokens_BT: Tensor,
    borders: Borders | None = None,
    read_K: Tensor | None = None,
) -> Tensor:
    """Compute `hidden_states` by a model's first part; packed rows switch its attention.

    Ranks that share a row compute a range of its tokens each, and gather what is read.
    """
    if borders is not None and (context := borders.context) is not None:
        if tokens_BT.shape[1] >= context.count:
            return _together(decoder, tokens_BT, borders, context, read_K)
        borders = replace(borders, context=None)  # the modules take no range without tokens
    if borders is not None and lean.acts(decoder):
        hidden_KD = lean.hidden_states(decoder, tokens_BT[0], borders, read_K)
        return hidden_KD[None] if read_K is None else hidden_KD
    if borders is None:
        hidden_BTD = decoder(input_ids=tokens_BT, use_cache=False).last_hidden_state
    else:
        hidden_BTD = _packed(decoder, tokens_BT, borders.position_1T, borders)
    return hidden_BTD if read_K is None else hidden_BTD.flatten(0, 1).index_select(0, read_K)


def _packed(decoder: nn.Module, tokens_1T: Tensor, position_1T: Tensor, borders: Borders) -> Tensor:
    config = getattr(decoder, "config")  # noqa: B009 (a Module types any attribute as a Tensor)
    config._attn_implementation = PACKED
    given = {"position_ids": position_1T, "borders": borders}
    return decoder(input_ids=tokens_1T, use_cache=False, **given).last_hidden_state


def _together(
    decoder: nn.Module,
    tokens_1T: Tensor,
    borders: Borders,
    context: ContextGroup,
    read_K: Tensor | None,
) -> Tensor:
    tokens = tokens_1T.shape[1]
    own, lengths = context.own(tokens), context.lengths(tokens)
    given = tokens_1T[:, own], borders.position_1T[:, own], borders
    hidden_LD = _packed(decoder, *given)[0]
    if read_K is None:
        return context.gathered(hidden_LD, lengths)[None]
    # Places ascend, so that the ranks' shares of them follow one another.
    ends = torch.tensor([*itertools.accumulate(lengths)], device=read_K.device)
    read_up_to = torch.searchsorted(read_K, ends).tolist()
    starts = [0, *read_up_to[:-1]]
    mine_K = read_K[starts[context.rank] : read_up_to[context.rank]] - own.start
    read = [end - start for start, end in zip(starts, read_up_to, strict=True)]
    return context.gathered(hidden_LD.index_select(0, mine_K), read)


def token_logprobs(
    model: nn.Module,
    tokens_BT: Tensor,
    mask_BT: Tensor,
    temperature: float = 1.0,
    chunk: int = 0,
    *,
    select_BT: Tensor | None = None,
    hidden_BTD: Tensor | None = None,
    borders: Borders | None = None,
    with_entropy: bool = False,
    entropy_top_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each selected token, and the entropy of the distribution it is from.

    tokens_BT int; mask_BT true on real tokens, with padding on the right only: causal attention
    ignores it, and positions are column numbers. Returns float32 logprobs_BT and entropy_BT (zero
    unless `with_entropy`); index t belongs to token t; index 0 and all that is not selected are 0.
    `select_BT` defaults to the real tokens. Only selected positions are projected to the
    vocabulary, `chunk` at a time, with 0 as many as `chunk_tokens` finds; chunks are recomputed in
    the backward pass: memory for logits is bounded for any number of tokens.
    Temperature 0 is greedy decoding: log-probs are then those of temperature 1. `entropy_top_k` > 0
    keeps the value of the entropy and gives it the gradient of the entropy among the k likeliest
    tokens (AEnt, arXiv 2509.03493): a bonus on it preserves alternatives without raising every
    token of the vocabulary. `hidden_BTD` are the rows' `hidden_states` if they are known already;
    else `borders` are given for packed rows (whose sequences' first tokens cannot be selected).
    Differentiable.
    """
    select_BT = mask_BT.bool() if select_BT is None else select_BT.bool()
    rows_N, columns_N = select_BT[:, 1:].nonzero(as_tuple=True)
    if hidden_BTD is None:
        hidden_BTD = hidden_states(model, tokens_BT, borders)
    blank_BT = torch.zeros(tokens_BT.shape, dtype=torch.float32, device=tokens_BT.device)
    if not len(rows_N):
        # Still a function of the weights: backward() must work for a micro-batch without actions.
        return blank_BT + 0.0 * hidden_BTD.float().sum(), blank_BT
    logprobs_N, entropy_N = target_logprobs(
        model,
        hidden_BTD[rows_N, columns_N],
        tokens_BT[rows_N, columns_N + 1],
        temperature,
        chunk,
        with_entropy=with_entropy,
        entropy_top_k=entropy_top_k,
    )
    index = rows_N, columns_N + 1
    return blank_BT.index_put(index, logprobs_N), blank_BT.index_put(index, entropy_N)


def target_logprobs(
    model: nn.Module,
    hidden_ND: Tensor,
    targets_N: Tensor,
    temperature: float,
    chunk: int,
    *,
    with_entropy: bool = False,
    entropy_top_k: int = 0,
    masks: TokenMasks | None = None,
    context: ContextGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `token_logprobs` of targets, at least one, behind known hidden states.

    `masks`: of targets that were sampled under a grammar. `context`: as in `read_out`.
    """
    _, head = split_model(model)
    readout = TargetReadout(targets_N.long(), temperature, with_entropy, entropy_top_k, masks)
    logprobs_N, entropy_N = read_out(head, hidden_ND, readout, chunk, context=context)
    return logprobs_N, entropy_N


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's weights by stable name, tied ones once; views, not copies.

    If some parameters are trained and others frozen, as with adapters, these are left out.
    """
    return {name: tensor.detach() for name, tensor in _own_tensors(model).items()}


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of `state_tensors` themselves."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    if len(frozen) == len(parameters):
        frozen = set()
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in frozen and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def weight_shapes(config: PretrainedConfig) -> dict[str, torch.Size]:
    """Return the shapes of a model's weights by the names of `state_tensors`, without making it."""
    return {name: tensor.shape for name, tensor in state_tensors(empty_model(config)).items()}


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def check_shapes(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
    """Raise ModelError, naming a tensor that is missing, unknown or of another shape."""
    for name in shapes.keys() ^ tensors.keys():
        raise ModelError(f"weight {name} is {'missing' if name in shapes else 'unknown'}")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            found = f"{list(tensor.shape)}, not {list(shapes[name])}"
            raise ModelError(f"weight {name} has shape {found}")


def pair_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pair the model's parameters and buffers with weights named as by `state_tensors`.

    Raises ModelError, naming the tensor that is missing, unknown or of another shape.
    """
    own = _own_tensors(model)
    check_shapes({name: tensor.shape for name, tensor in own.items()}, tensors)
    return [(tensor, tensors[name]) for name, tensor in own.items()]


@torch.no_grad()
def load_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights into the model; all of them, or none on a ModelError of `pair_state`."""
    for own, new in pair_state(model, tensors):
        own.copy_(new)


def export(model: PreTrainedModel, directory: str | Path, tokenizer_dir: str | Path) -> None:
    """Write the model and the tokenizer of `tokenizer_dir` as one Hugging Face directory."""
    model.save_pretrained(directory)
    follow_umask(*Path(directory).glob("*.safetensors"))
    for name in TOKENIZER_FILES:
        source = Path(tokenizer_dir) / name
        if source.is_file():
            shutil.copyfile(source, Path(directory) / name)
