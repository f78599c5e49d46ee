"""The forward over KV slots gives the module's own logits, whichever way its products go."""

from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from actors.engines.decoding import fused, linears
from actors.engines.decoding.forward import SlotModel
from actors.engines.decoding.fused import FusedDecoder
from actors.engines.decoding.kv_slots import Slots

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen2_tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "llama_biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
}
PROMPTS = (0, 1, 2, 4)  # the slots that have one
# The slots of each step: first the prompts, then single tokens.
STEPS = (PROMPTS, PROMPTS, (0, 1, 4), (0, 1, 4), (0, 1, 2), (0, 1, 2), PROMPTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_module(name: str, dtype: torch.dtype) -> None:
    """Slots are adjacent, have an idle one between them, and are scattered."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa").eval()
    assert FusedDecoder.fits(model)
    with torch.no_grad():
        for weight in model.parameters():  # biases and norms, too
            weight.add_(0.1 * torch.randn_like(weight))
    model.to(dtype)
    forward, slots = SlotModel(model, 48), Slots(5, 48, dtype, model.device, keep=False)
    tokens = torch.randint(0, 50, (5, 48)).numpy().astype(np.int32)

    def step(chosen: tuple[int, ...]) -> float:
        rows = np.array(chosen)
        counts = slots.total[rows] - slots.cached[rows]
        inputs, last = slots.batch(rows, counts)
        hidden_ND = forward(slots, inputs).flatten(0, 1)
        logits_BV = forward.head(hidden_ND if last is None else hidden_ND[last])
        slots.write(rows, counts, np.arange(len(rows)), np.arange(len(rows)))
        read = [torch.from_numpy(tokens[row : row + 1, : slots.total[row]]).long() for row in rows]
        expected_BV = torch.cat([model(input_ids=one_1T).logits[:, -1] for one_1T in read])
        slots.append(rows, tokens[rows, slots.total[rows]].tolist())
        return ((logits_BV - expected_BV).abs().max() / expected_BV.abs().max()).item()

    with torch.inference_mode():
        for _ in range(2):
            for slot in PROMPTS:
                slots.assign(slot, tokens[slot, : 6 + 2 * slot])
            worst = max(step(chosen) for chosen in STEPS)
            assert worst < (1e-5 if dtype == torch.float32 else 5e-2)
            for weight in model.parameters():
                weight.data = weight + 0.1 * torch.randn_like(weight)
            forward.renew()
            slots.start_epoch()


def test_copies_of_new_weights_are_not_made_beside_those_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: WeakSet[linears.Linear] = WeakSet()
    counts: list[int] = []

    class Counted(linears.Linear):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            alive.add(self)
            counts.append(len(alive))

    monkeypatch.setattr(fused, "Linear", Counted)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"], attn_implementation="sdpa").eval()
    decoder = FusedDecoder(model, 48)
    whole = max(counts)
    assert whole == 1 + 2 * SHAPE["num_hidden_layers"]
    counts.clear()
    decoder.renew()
    assert max(counts) == whole
