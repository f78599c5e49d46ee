"""FLOPs and memory traffic of a training pass per token, by count; nothing is measured.

    python tests/benchmarks/bench_counts.py

One decoder layer of the models' true sizes runs on torch's `meta` device, and the projection onto
the vocabulary with few tokens of a small vocabulary, whose bytes grow with both. Attention, as one
kernel, has the FLOPs of its scores and moves its inputs and outputs alone. What a kernel of a GPU
fuses is counted so: norms, and the conversion of logits in softmax. The share of the peak rate is
an estimate: products at `PRODUCTS` of the rate of a card, all else at `MEMORY` of its bandwidth.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from tensor_memory import Traffic

from evolver_async.config.shape import DecoderShape
from evolver_async.model import policy
from evolver_async.model.logit_chunks import chunk_tokens

MODELS = {
    "0.5B": DecoderShape(24, 896, 4864, 14, 2, 64, 151936, tied=True),
    "7B": DecoderShape(28, 3584, 18944, 28, 4, 128, 152064),
}
CONTEXT = 4096  # tokens of a row
ACTIONS = 0.5  # share of tokens that are projected onto the vocabulary
TOKENS, VOCABULARY = 256, 4096  # of the counted projection
RATE, BANDWIDTH = 989e12, 4.8e12  # of an H200 in bfloat16
PRODUCTS, MEMORY = 0.7, 0.8


@dataclass(frozen=True)
class Counted:
    """FLOPs and bytes of a forward and backward pass, per token."""

    flops: float
    moved: float


def no_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """Stand in for a kernel whose own count is `attention`."""
    return query.transpose(1, 2), None


def attention(shape: DecoderShape) -> Counted:
    """Count the scores of half of the context and their sums, two products, three backward and one
    again; queries, keys, values and output, backward with gradients."""
    flops = 4 * shape.queries * CONTEXT / 2 * 3.5
    return Counted(flops, 2 * 3 * (2 * shape.queries + 2 * shape.keys))


def model_of(shape: DecoderShape, vocabulary: int) -> Any:
    sizes = Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=vocabulary,
    )
    sizes._attn_implementation = "counted"
    return AutoModelForCausalLM.from_config(sizes).to(torch.bfloat16)


def layer(shape: DecoderShape, fused: bool) -> Counted:
    """Count one layer, with its attention."""
    with torch.device("meta"):
        decoder = model_of(shape, 8).model
        hidden = torch.zeros(1, CONTEXT, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
        angles = decoder.rotary_emb(hidden, torch.arange(CONTEXT)[None])
    counted, norms = decoder.layers[0], 0
    if fused:
        # forward in and out; backward in, its gradient, and out
        norms = 2 * 2 * 5 * shape.hidden
        counted.input_layernorm = counted.post_attention_layernorm = nn.Identity()
    with Traffic(0) as moved:
        found = counted(hidden, position_embeddings=angles, attention_mask=None)
        torch.autograd.backward(found, torch.zeros_like(found))
    scores = attention(shape)
    rest = moved.rest / CONTEXT + norms + scores.moved
    return Counted(moved.flops / CONTEXT + scores.flops, rest)


def head(shape: DecoderShape, entropy_coef: float) -> Counted:
    """Count the projection of an ACTION token, in chunks, whose head has a gradient."""
    chunk = chunk_tokens(0, shape.vocabulary, gpu=True)
    model = model_of(shape, VOCABULARY)
    hidden_ND = torch.zeros(TOKENS, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    targets_N = torch.zeros(TOKENS, dtype=torch.long)
    with Traffic(VOCABULARY) as moved:
        logprobs_N, entropy_N = policy.target_logprobs(
            model, hidden_ND, targets_N, 1.0, TOKENS, with_entropy=True
        )
        value = logprobs_N.sum() + (entropy_coef * entropy_N.sum() if entropy_coef else 0)
        value.backward()
    # A CPU converts bfloat16 in a pass of its own before a softmax; a GPU reads it there.
    converted = 8 * 2
    a_logit = moved.rest / TOKENS / VOCABULARY - converted
    # Several chunks compute logits twice, and each adds its gradient of the head: bfloat16 is
    # written and read, float32 read and written.
    product = 2 * shape.vocabulary * shape.hidden
    summed = (2 + 2 + 4 + 4) * shape.embedding / chunk
    return Counted(4 * product, a_logit * shape.vocabulary + summed)


def counts(shape: DecoderShape) -> list[str]:
    plain, fused, of_head = layer(shape, False), layer(shape, True), head(shape, 0.0)
    trained = shape.layers * shape.layer + ACTIONS * shape.embedding
    scores = shape.layers * 3 * 4 * shape.queries * CONTEXT / 2
    useful = 6 * trained + scores  # of a model without anything computed twice

    def share(one: Counted) -> float:
        flops = shape.layers * one.flops + ACTIONS * of_head.flops
        moved = shape.layers * one.moved + ACTIONS * of_head.moved
        seconds = flops / RATE / PRODUCTS + moved / BANDWIDTH / MEMORY
        return useful / RATE / seconds

    return [
        f"{shape.layers * fused.flops / 1e9:.2f}",
        f"{of_head.flops / 1e9:.2f}",
        f"{shape.layers * plain.moved / 1e6:.1f}",
        f"{shape.layers * fused.moved / 1e6:.1f}",
        f"{of_head.moved / 1e6:.1f}",
        f"{head(shape, 0.1).moved / 1e6:.1f}",
        f"{share(plain):.0%}",
        f"{share(fused):.0%}",
    ]


def main() -> None:
    ALL_ATTENTION_FUNCTIONS.register("counted", no_attention)
    print(
        "GFLOP and MB per token: layers, head; layers, with fused norms, head, with bonus; shares"
    )
    for name, shape in MODELS.items():
        print(f"| {name} | " + " | ".join(counts(shape)) + " |")


if __name__ == "__main__":
    main()
