"""Fused forward pass of Llama-like models on the module's own weights.

On small models the overhead of transformers' modules exceeds the time of their operations. This
module runs the same operations, fused if torch has a kernel; a conformance test compares the two.
With few tokens, making tensors and views takes as long as computing, so the layers share theirs
(`_StepBuffers`).

`N` tokens, of `B` rows with `Q` new tokens each, `H` heads, `D` head size, `M` hidden size, `G`
gates, `T` columns of context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from actors.engines.decoding.kv_slots import Slots
from actors.engines.decoding.linears import Linear, Linears
from evolver_async.memory.bounds import MAX_COPIED
from evolver_async.model.cpu.products import ShortLinear

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3")  # rotations that depend on positions only


@dataclass
class _Layer:
    """Parameters of one layer: weights of norms, and linear maps."""

    norm: Tensor
    inner: Linears  # to queries, keys and values
    head_norms: Tensor | None  # [heads of queries and keys, D]
    out: Linear
    mlp_norm: Tensor
    gates: Linears  # to the gate and what it multiplies
    down: Linear


class _RmsNorm:
    """x / rms(x) * weight in fewer passes than torch's function, which is not fused on CPU.

    `kept`: the first result is memory for all others.
    """

    def __init__(self, eps: Tensor, kept: bool) -> None:
        self._eps, self._kept = eps, kept
        self._scale: Tensor | None = None
        self._scaled: Tensor | None = None
        self._normed: Tensor | None = None

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.linalg.vector_norm(
            x, dim=-1, keepdim=True, dtype=torch.float32, out=self._scale
        )
        torch.addcmul(self._eps, scale, scale, value=1 / x.shape[-1], out=scale).rsqrt_()
        scaled = torch.mul(x, scale, out=self._scaled)
        normed = scaled.mul_(weight)
        if normed.dtype != x.dtype:
            normed = normed.to(x.dtype) if self._normed is None else self._normed.copy_(normed)
        if self._kept:
            self._scale, self._scaled, self._normed = scale, scaled, normed
        return normed


class _Heads:
    """A layer's queries, keys and values [N, H * D], and views of them."""

    def __init__(self, qkv: Tensor, rows: int, queries: int, keys: int) -> None:
        self.qkv = qkv
        heads_NHD = qkv.unflatten(1, (queries + 2 * keys, -1))
        self.rotated_NHD = heads_NHD[:, : queries + keys]
        self.stored_N2HD = heads_NHD[:, queries:].unflatten(1, (2, -1))
        self.query_BHQD = heads_NHD[:, :queries].unflatten(0, (rows, -1)).transpose(1, 2)
        self._source_NHD: Tensor | None = None

    def rotate(
        self, x_NHD: Tensor, cos_N1D: Tensor, minus_sin_N1D: Tensor, sin_N1D: Tensor
    ) -> None:
        """Set queries and keys to x * cos + rotate_half(x) * sin; take the sines of the halves.

        x may be the queries and keys themselves.
        """
        if x_NHD is not self._source_NHD:
            self._source_NHD, self._rolled_NHD = x_NHD, torch.empty_like(x_NHD)
            self._halves = *x_NHD.chunk(2, -1), *self._rolled_NHD.chunk(2, -1)
        first, second, to_first, to_second = self._halves
        torch.mul(second, minus_sin_N1D, out=to_first)
        torch.mul(first, sin_N1D, out=to_second)
        torch.addcmul(self._rolled_NHD, x_NHD, cos_N1D, out=self.rotated_NHD)


class _Gates:
    """A layer's gates [N, G], and memory for the gated products [N, G / 2]."""

    def __init__(self, whole_NG: Tensor) -> None:
        self.whole_NG = whole_NG
        self._gate, self._up = whole_NG.chunk(2, 1)
        self._products = torch.empty_like(self._up)

    def products(self) -> Tensor:
        return torch.mul(F.silu(self._gate, inplace=True), self._up, out=self._products)


class _StepBuffers:
    """Results of the layers of one forward.

    `kept`: the first layer's results are memory for the others and for later forwards, except
    products in bfloat16, which are new tensors. With many tokens all are new: memory that was just
    freed is still in the processor's cache.
    """

    def __init__(self, rows: int, queries: int, keys: int, eps: Tensor, kept: bool) -> None:
        self.rows = rows
        self._queries, self._keys, self._kept = queries, keys, kept
        self.norm, self._head_norm = _RmsNorm(eps, kept), _RmsNorm(eps, kept)
        self._heads: _Heads | None = None
        self._gates: _Gates | None = None

    def heads(self, layer: _Layer, x_NM: Tensor, rotation: Sequence[Tensor]) -> _Heads:
        """Compute queries and keys, rotated, and values."""
        heads = self._heads
        qkv = layer.inner(x_NM, None if heads is None else heads.qkv)
        if heads is None or heads.qkv is not qkv:
            heads = _Heads(qkv, self.rows, self._queries, self._keys)
        both_NHD = heads.rotated_NHD
        if layer.head_norms is not None:
            both_NHD = self._head_norm(both_NHD, layer.head_norms)
        heads.rotate(both_NHD, *rotation)
        if self._kept:
            self._heads = heads
        return heads

    def gated(self, layer: _Layer, x_NM: Tensor) -> Tensor:
        """Compute the gated products [N, G / 2]."""
        gates = self._gates
        whole_NG = layer.gates(x_NM, None if gates is None else gates.whole_NG)
        if gates is None or gates.whole_NG is not whole_NG:
            gates = _Gates(whole_NG)
        if self._kept:
            self._gates = gates
        return gates.products()


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
        self._queries = config.num_attention_heads
        self._keys = config.num_key_value_heads
        self._buffers: _StepBuffers | None = None  # of the last decoding step
        small = sum(one.numel() for one in model.parameters()) <= MAX_COPIED
        self._copied = small and model.device.type == "cpu"
        self.renew()
        positions = torch.arange(max_length, device=model.device)[None]
        with torch.no_grad():
            cos, sin = self._decoder.rotary_emb(self._embed, positions)
        first, second = sin.chunk(2, -1)
        parts = cos, -first, second
        self._rotations_T1D = torch.cat(parts, -1).transpose(0, 1)
        self._rotation_sizes = [part.shape[-1] for part in parts]

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        if type(model).__name__ not in ARCHITECTURES:
            return False
        rope = getattr(model.base_model.rotary_emb, "rope_type", None)
        return rope in ROPE_TYPES and model.config.hidden_act == "silu"

    @torch.inference_mode()
    def renew(self) -> None:
        """Read the module's weights, which have changed."""
        self._layers: list[_Layer] = []  # copies of before go first: both would not be planned for
        self._embed = self._decoder.embed_tokens.weight
        self._norm = self._decoder.norm.weight
        self.head = Linear(self._head_module.weight, self._head_module.bias)
        self._layers = [self._layer(layer) for layer in self._decoder.layers]

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        inner = [attention.q_proj, attention.k_proj, attention.v_proj]
        out, down = attention.o_proj, mlp.down_proj
        return _Layer(
            norm=layer.input_layernorm.weight,
            inner=Linears(inner, self._copied),
            head_norms=self._head_norms(attention),
            out=Linear(out.weight, out.bias, isinstance(out, ShortLinear)),
            mlp_norm=layer.post_attention_layernorm.weight,
            gates=Linears([mlp.gate_proj, mlp.up_proj], self._copied),
            down=Linear(down.weight, down.bias, isinstance(down, ShortLinear)),
        )

    def _head_norms(self, attention: Any) -> Tensor | None:
        if not hasattr(attention, "q_norm"):
            return None
        of_query, of_key = attention.q_norm.weight, attention.k_norm.weight
        return torch.stack([of_query] * self._queries + [of_key] * self._keys)

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, slots: Slots
    ) -> Tensor:
        """Return the hidden states, which the next call may overwrite."""
        rows, length = input_ids.shape
        buffers = self._buffers_for(rows, length)
        x_NM = torch.embedding(self._embed, input_ids.view(-1))
        rotation = self._rotations_T1D[position_ids.view(-1)].split(self._rotation_sizes, -1)
        shared = self._queries // self._keys
        folded = shared > 1 and (length == 1 or input_ids.is_cuda)
        if folded and length > 1:
            attention_mask = attention_mask.repeat(1, 1, shared, 1)
        for index, layer in enumerate(self._layers):
            heads = buffers.heads(layer, buffers.norm(x_NM, layer.norm), rotation)
            keys_BHTD, values_BHTD = slots.store(heads.stored_N2HD, index)
            mixed_BHQD = self._attend(
                heads.query_BHQD, keys_BHTD, values_BHTD, attention_mask, folded
            )
            layer.out.add(mixed_BHQD.transpose(1, 2).reshape(len(x_NM), -1), x_NM)
            layer.down.add(buffers.gated(layer, buffers.norm(x_NM, layer.mlp_norm)), x_NM)
        return buffers.norm(x_NM, self._norm).unflatten(0, (rows, length))

    def _buffers_for(self, rows: int, length: int) -> _StepBuffers:
        """Return the buffers of a forward; those of the last decoding step are kept."""
        if length > 1:
            return _StepBuffers(rows, self._queries, self._keys, self._eps, kept=False)
        if self._buffers is None or self._buffers.rows != rows:
            self._buffers = _StepBuffers(rows, self._queries, self._keys, self._eps, kept=True)
        return self._buffers

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
        heads = self._keys, self._queries // self._keys
        if not folded:
            return attend(query_BHQD, key, value, mask, enable_gqa=heads[1] > 1)
        queries = query_BHQD.unflatten(1, heads).flatten(2, 3)
        mixed = attend(queries, key, value, mask)
        return mixed.unflatten(2, (heads[1], query_BHQD.shape[2])).flatten(1, 2)
