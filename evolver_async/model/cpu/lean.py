"""Forward pass of Qwen3, Qwen2 and Llama decoders over packed rows, in fewer passes over memory.

It computes what transformers' modules do, with their weights. Rotation, norms and gates have
backward passes of their own; the last layer computes its queries and all behind its attention only
for the tokens that are read. Other models, devices and precisions go through transformers.

Shapes: `T` tokens of a packed row, `K` tokens that are read, `M` hidden size, `H` heads, `D` head
size, `I` size of the gated layer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from evolver_async.model.cpu.tree_attention import attend
from evolver_async.model.rows.borders import Borders

FAMILIES = (LlamaModel, Qwen2Model, Qwen3Model)
RECOMPUTED = "recomputed"  # attribute of a layer that is computed again in the backward pass
COMPILED = "compiled"  # attribute of a layer that torch compiles


def acts(decoder: nn.Module) -> bool:
    """True if `hidden_states` computes this decoder: float32 on a CPU, whole contexts, SiLU.

    Sharded weights are gathered by hooks of the modules, which it does not call.
    """
    if type(decoder) not in FAMILIES:
        return False
    first: Any = decoder.get_submodule("layers.0")
    weight = first.self_attn.q_proj.weight
    return (
        type(weight) is nn.Parameter
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and getattr(decoder.config, "hidden_act", None) == "silu"
        and not any(getattr(one.self_attn, "sliding_window", None) for one in _layers(decoder))
        and not getattr(first, COMPILED, False)
    )


def _layers(decoder: Any) -> Any:
    return decoder.layers[: decoder.config.num_hidden_layers]


def hidden_states(
    decoder: Any, tokens_T: Tensor, borders: Borders, places_K: Tensor | None = None
) -> Tensor:
    """Compute the last hidden states of the tokens at `places_K`, [K, M]; of all without it."""
    hidden_TM = decoder.embed_tokens(tokens_T)
    position_T = borders.position_1T[0]
    known = torch.arange(int(position_T.max()) + 1)[None]
    cos_TD, sin_TD = (one[0][position_T] for one in decoder.rotary_emb(hidden_TM, known))
    # The half that a rotation subtracts has its sign in the table.
    sin_TD = sin_TD.clone()
    sin_TD[:, : sin_TD.shape[1] // 2].neg_()
    layers = _layers(decoder)
    for index, layer in enumerate(layers):
        wanted_K = places_K if index == len(layers) - 1 else None
        given = layer, hidden_TM, cos_TD, sin_TD, borders, wanted_K
        if torch.is_grad_enabled() and getattr(layer, RECOMPUTED, False):
            hidden_TM = checkpoint(_layer, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden_TM = _layer(*given)
        assert isinstance(hidden_TM, Tensor)
    norm = decoder.norm
    return Normalise.apply(hidden_TM, norm.variance_epsilon) * norm.weight


def _layer(
    layer: Any, hidden_TM: Tensor, cos_TD: Tensor, sin_TD: Tensor, borders: Borders, wanted_K: Any
) -> Tensor:
    """Compute one decoder layer; with `wanted_K` only for these tokens."""
    attention, mlp = layer.self_attn, layer.mlp
    size = attention.head_dim
    inner_T = _linears(
        layer.input_layernorm, hidden_TM, attention.q_proj, attention.k_proj, attention.v_proj
    ).unflatten(1, (-1, size))
    values = attention.v_proj.out_features // size
    query_THD, key_THD, value_THD = inner_T.split(
        [inner_T.shape[1] - 2 * values, values, values], 1
    )
    query_THD = _rotate(getattr(attention, "q_norm", None), query_THD, cos_TD, sin_TD)
    key_THD = _rotate(getattr(attention, "k_norm", None), key_THD, cos_TD, sin_TD)
    mixed_TM = attend(query_THD, key_THD, value_THD, borders, attention.scaling).flatten(1)
    if wanted_K is not None:
        mixed_TM, hidden_TM = (
            mixed_TM.index_select(0, wanted_K),
            hidden_TM.index_select(0, wanted_K),
        )
    hidden_TM = _added(attention.o_proj, hidden_TM, mixed_TM)
    gate_TI = _linears(layer.post_attention_layernorm, hidden_TM, mlp.gate_proj, mlp.up_proj)
    return _added(mlp.down_proj, hidden_TM, Gate.apply(gate_TI))


def _linears(norm: Any, hidden_TM: Tensor, *linears: nn.Module) -> Tensor:
    """Apply several linears to the normed input at once; the norm's weights go into theirs."""
    normed_TM = Normalise.apply(hidden_TM, norm.variance_epsilon)
    assert isinstance(normed_TM, Tensor)
    if any(type(one) is not nn.Linear for one in linears):
        normed_TM = normed_TM * norm.weight
        return torch.cat([one(normed_TM) for one in linears], 1)
    plain: list[Any] = [*linears]
    weight_OM = torch.cat([one.weight for one in plain])
    biases = [one.bias for one in plain if one.bias is not None]
    bias_O = torch.cat(biases) if biases else None
    return F.linear(normed_TM, weight_OM * norm.weight, bias_O)


def _added(module: nn.Module, hidden_TM: Tensor, input_TI: Tensor) -> Tensor:
    """Add a linear of the input to the hidden states."""
    if type(module) is nn.Linear:
        return hidden_TM + F.linear(input_TI, module.weight, module.bias)
    return hidden_TM + module(input_TI)


def _rotate(norm: Any, part_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Norm the heads, if the model does, and rotate them by their positions."""
    if norm is None:
        found = Rotate.apply(part_THD, cos_TD, sin_TD)
    else:
        normed = Normalise.apply(part_THD, norm.variance_epsilon)
        found = Rotate.apply(normed * norm.weight, cos_TD, sin_TD)
    assert isinstance(found, Tensor)
    return found


class Normalise(torch.autograd.Function):
    """Division by the root mean square of the last dimension: RMSNorm without weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        grad = gradients[0]
        along = (grad * y).mean(-1, keepdim=True)
        return torch.addcmul(grad, y, along, value=-1).mul_(scale), None


class Rotate(torch.autograd.Function):
    """Rotary position embedding: x cos + swap(x) sin, where `swap` exchanges the halves.

    sin has the sign of rotate_half: negative in its first half.
    """

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return _turned(x_THD, cos_TD, sin_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_TD, sin_TD = ctx.saved_tensors
        return _turned(gradients[0], cos_TD, -sin_TD), None, None


def _turned(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    half = x_THD.shape[-1] // 2
    y_THD = x_THD * cos_TD[:, None]
    y_THD[..., :half].addcmul_(x_THD[..., half:], sin_TD[:, None, :half])
    y_THD[..., half:].addcmul_(x_THD[..., :half], sin_TD[:, None, half:])
    return y_THD


class Gate(torch.autograd.Function):
    """SiLU of the first half of the columns, times the second half."""

    @staticmethod
    def forward(ctx: Any, both_TI: Tensor) -> Tensor:
        gate, up = both_TI.chunk(2, 1)
        ctx.save_for_backward(both_TI)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (both_TI,) = ctx.saved_tensors
        gate, up = both_TI.chunk(2, 1)
        grad_TI = gradients[0]
        found = torch.empty_like(both_TI)
        for_gate, for_up = found.chunk(2, 1)
        torch.mul(grad_TI, F.silu(gate), out=for_up)
        torch.ops.aten.silu_backward.grad_input(grad_TI * up, gate, grad_input=for_gate)
        return found
