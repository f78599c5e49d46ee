"""Fused forward pass of Llama-like models on the module's own weights.

On small models the overhead of transformers' modules exceeds the time of their operations. This
module runs the same operations, fused if torch has a kernel; a conformance test compares the two.

`N` tokens, of `B` rows with `Q` new tokens each, `H` heads, `D` head size, `M` hidden size, `T`
columns of context.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from actors.engines.decoding.kv_slots import Slots
from actors.engines.decoding.linears import Linears
from evolver_async.memory.bounds import MAX_COPIED

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3")  # rotations that depend on positions only


@dataclass
class _Layer:
    """Parameters of one layer: weights of norms, and linear maps."""

    norm: Tensor
    inner: Linears  # to queries, keys and values
    head_norms: Tensor | None  # [heads of queries and keys, D]
    out: Linears
    mlp_norm: Tensor
    gates: Linears  # to the gate and what it multiplies
    down: Linears


class FusedDecoder:
    """Forward pass over KV slots to hidden states [B, Q, M].

    Raise ValueError for unsupported models.
    """

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        if not self.fits(model):
            raise ValueError(f"{type(model).__name__} has no fused forward")
        config = model.config
        self._decoder: Any = model.base_model
        self._head_module: Any = model.get_output_embeddings()
        self._eps = torch.tensor(config.rms_norm_eps, device=model.device)
        self._head_dim = self._decoder.layers[0].self_attn.head_dim
        self._queries = config.num_attention_heads
        self._keys = config.num_key_value_heads
        self._embed, self._norm = self._decoder.embed_tokens.weight, self._decoder.norm.weight
        small = sum(one.numel() for one in model.parameters()) <= MAX_COPIED
        self._copied = small and model.device.type == "cpu"
        self.renew()
        positions = torch.arange(max_length, device=model.device)[None]
        with torch.no_grad():
            cos, sin = self._decoder.rotary_emb(self._embed, positions)
        # (x rolled by half a head) * self._sin == rotate_half(x) * sin
        first, second = sin[0].chunk(2, -1)
        self._cos, self._sin = cos[0], torch.cat([-first, second], -1)

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        if type(model).__name__ not in ARCHITECTURES:
            return False
        rope = getattr(model.base_model.rotary_emb, "rope_type", None)
        return rope in ROPE_TYPES and model.config.hidden_act == "silu"

    @torch.inference_mode()
    def renew(self) -> None:
        """Read the module's weights, which have changed."""
        self.head = Linears([self._head_module], self._copied)
        self._layers = [self._layer(layer) for layer in self._decoder.layers]

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        inner = [attention.q_proj, attention.k_proj, attention.v_proj]
        return _Layer(
            norm=layer.input_layernorm.weight,
            inner=Linears(inner, self._copied),
            head_norms=self._head_norms(attention),
            out=Linears([attention.o_proj], self._copied),
            mlp_norm=layer.post_attention_layernorm.weight,
            gates=Linears([mlp.gate_proj, mlp.up_proj], self._copied),
            down=Linears([mlp.down_proj], self._copied),
        )

    def _head_norms(self, attention: Any) -> Tensor | None:
        if not hasattr(attention, "q_norm"):
            return None
        of_query, of_key = attention.q_norm.weight, attention.k_norm.weight
        return torch.stack([of_query] * self._queries + [of_key] * self._keys)

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, slots: Slots
    ) -> Tensor:
        rows, length = input_ids.shape
        x_NM = F.embedding(input_ids.view(-1), self._embed)
        cos_N1D = self._cos[position_ids.view(-1)].unsqueeze(1)
        sin_N1D = self._sin[position_ids.view(-1)].unsqueeze(1)
        shared = self._queries // self._keys
        folded = shared > 1 and (length == 1 or input_ids.is_cuda)
        if folded and length > 1:
            attention_mask = attention_mask.repeat(1, 1, shared, 1)
        for index, layer in enumerate(self._layers):
            inner_NHD = self._inner(layer, x_NM, cos_N1D, sin_N1D)
            keys_BHTD, values_BHTD = slots.store(inner_NHD[:, self._queries :], index)
            query_NHD = inner_NHD[:, : self._queries]
            query_BHQD = query_NHD.unflatten(0, (rows, length)).transpose(1, 2)
            mixed_BHQD = self._attend(query_BHQD, keys_BHTD, values_BHTD, attention_mask, folded)
            x_NM = x_NM + layer.out(mixed_BHQD.transpose(1, 2).flatten(2).flatten(0, 1))
            gate, up = layer.gates(_rms_norm(x_NM, layer.mlp_norm, self._eps)).chunk(2, 1)
            x_NM = x_NM + layer.down(F.silu(gate).mul_(up))
        return _rms_norm(x_NM, self._norm, self._eps).unflatten(0, (rows, length))

    def _attend(
        self, query_BHQD: Tensor, key: Tensor, value: Tensor, mask: Tensor, folded: bool
    ) -> Tensor:
        """Return the attention [B, H, Q, D] to keys and values [B, K, T, D] by mask [B, 1, Q, T].

        `folded`: heads that share a key become queries of one head, whose mask has a row for each
        of these. On a GPU torch would otherwise copy keys and values for every head, as its
        kernels take no mask with fewer keys than queries. On a CPU torch's own way takes 1.4 times
        as long for single tokens, and .8 times for a prompt.
        """
        attend = F.scaled_dot_product_attention
        if not folded:
            return attend(query_BHQD, key, value, mask, enable_gqa=self._queries != self._keys)
        heads = self._keys, self._queries // self._keys
        queries = query_BHQD.unflatten(1, heads).flatten(2, 3)
        mixed = attend(queries, key, value, mask)
        return mixed.unflatten(2, (heads[1], query_BHQD.shape[2])).flatten(1, 2)

    def _inner(self, layer: _Layer, x_NM: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
        """Return queries and keys, rotated, and values [N, H, D]."""
        inner_NM = layer.inner(_rms_norm(x_NM, layer.norm, self._eps))
        inner_NHD = inner_NM.unflatten(1, (-1, self._head_dim))
        both_NHD = turned_NHD = inner_NHD[:, : self._queries + self._keys]
        if layer.head_norms is not None:
            both_NHD = _rms_norm(both_NHD, layer.head_norms, self._eps)
        rolled_NHD = both_NHD.roll(self._head_dim // 2, -1).mul_(sin_N1D)
        torch.addcmul(rolled_NHD, both_NHD, cos_N1D, out=turned_NHD)
        return inner_NHD


def _rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Compute x / rms(x) * weight, in fewer passes than torch's function, unfused on CPU."""
    size = x.shape[-1]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, norm, norm, value=1 / size).rsqrt_()
    return (x * scale).mul_(weight).to(x.dtype)
