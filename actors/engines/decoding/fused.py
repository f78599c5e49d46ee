"""Fused forward pass of Llama-like models on the module's own weights.

On small models the overhead of transformers' modules exceeds the time of their operations. This
module runs the same operations, fused if torch has a kernel; a conformance test compares the two.

`B` rows, `Q` new tokens a row, `H` heads, `D` head size, `M` hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from actors.engines.decoding.kv_slots import Slots

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3")  # rotations that depend on positions only


@dataclass
class _Layer:
    """Views of one layer's parameters: (weight, bias) or the weight of a norm."""

    norm: Tensor
    query: tuple[Tensor, Tensor | None]
    key: tuple[Tensor, Tensor | None]
    value: tuple[Tensor, Tensor | None]
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: tuple[Tensor, Tensor | None]
    mlp_norm: Tensor
    gate: tuple[Tensor, Tensor | None]
    up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


class FusedDecoder:
    """Forward pass over KV slots to hidden states [B, Q, M].

    Raise ValueError for unsupported models.
    """

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        if not self.fits(model):
            raise ValueError(f"{type(model).__name__} has no fused forward")
        config = model.config
        decoder: Any = model.base_model
        self._eps = torch.tensor(config.rms_norm_eps, device=model.device)
        self._head_dim = decoder.layers[0].self_attn.head_dim
        self._queries = config.num_attention_heads
        self._grouped = config.num_key_value_heads != config.num_attention_heads
        self._embed, self._norm = decoder.embed_tokens.weight, decoder.norm.weight
        self._layers = [_layer(layer) for layer in decoder.layers]
        positions = torch.arange(max_length, device=model.device)[None]
        with torch.no_grad():
            cos, sin = decoder.rotary_emb(self._embed, positions)
        # (x rolled by half a head) * self._sin == rotate_half(x) * sin
        first, second = sin[0].chunk(2, -1)
        self._cos, self._sin = cos[0], torch.cat([-first, second], -1)

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        if type(model).__name__ not in ARCHITECTURES:
            return False
        rope = getattr(model.base_model.rotary_emb, "rope_type", None)
        return rope in ROPE_TYPES and model.config.hidden_act == "silu"

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, slots: Slots
    ) -> Tensor:
        x_BQM = F.embedding(input_ids, self._embed)
        cos_BQ1D = self._cos[position_ids].unsqueeze(2)
        sin_BQ1D = self._sin[position_ids].unsqueeze(2)
        for index, layer in enumerate(self._layers):
            x_BQM = x_BQM + self._attend(
                index, layer, x_BQM, cos_BQ1D, sin_BQ1D, attention_mask, slots
            )
            h_BQM = _rms_norm(x_BQM, layer.mlp_norm, self._eps)
            gated = F.silu(F.linear(h_BQM, *layer.gate)).mul_(F.linear(h_BQM, *layer.up))
            x_BQM = x_BQM + F.linear(gated, *layer.down)
        return _rms_norm(x_BQM, self._norm, self._eps)

    def _attend(
        self,
        index: int,
        layer: _Layer,
        x_BQM: Tensor,
        cos_BQ1D: Tensor,
        sin_BQ1D: Tensor,
        mask: Tensor,
        slots: Slots,
    ) -> Tensor:
        size = (self._head_dim,)
        h_BQM = _rms_norm(x_BQM, layer.norm, self._eps)
        query_BQHD = F.linear(h_BQM, *layer.query).unflatten(-1, (-1, *size))
        key_BQHD = F.linear(h_BQM, *layer.key).unflatten(-1, (-1, *size))
        value_BQHD = F.linear(h_BQM, *layer.value).unflatten(-1, (-1, *size))
        if layer.query_norm is not None:
            query_BQHD = _rms_norm(query_BQHD, layer.query_norm, self._eps)
        if layer.key_norm is not None:
            key_BQHD = _rms_norm(key_BQHD, layer.key_norm, self._eps)
        both_BQHD = torch.cat([query_BQHD, key_BQHD], 2)
        rotated_BQHD = both_BQHD.roll(self._head_dim // 2, -1).mul_(sin_BQ1D)
        both_BHQD = rotated_BQHD.addcmul_(both_BQHD, cos_BQ1D).transpose(1, 2)
        keys, values = slots.update(
            both_BHQD[:, self._queries :], value_BQHD.transpose(1, 2), index
        )
        out_BHQD = F.scaled_dot_product_attention(
            both_BHQD[:, : self._queries], keys, values, attn_mask=mask, enable_gqa=self._grouped
        )
        return F.linear(out_BHQD.transpose(1, 2).flatten(2), *layer.out)


def _rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Compute x / rms(x) * weight, in fewer passes than torch's function, unfused on CPU."""
    size = x.shape[-1]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, norm, norm, value=1 / size).rsqrt_()
    return (x * scale).mul_(weight).to(x.dtype)


def _layer(module: Any) -> _Layer:
    attention, mlp = module.self_attn, module.mlp

    def linear(part: Any) -> tuple[Tensor, Tensor | None]:
        return part.weight, part.bias

    return _Layer(
        norm=module.input_layernorm.weight,
        query=linear(attention.q_proj),
        key=linear(attention.k_proj),
        value=linear(attention.v_proj),
        query_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        out=linear(attention.o_proj),
        mlp_norm=module.post_attention_layernorm.weight,
        gate=linear(mlp.gate_proj),
        up=linear(mlp.up_proj),
        down=linear(mlp.down_proj),
    )
