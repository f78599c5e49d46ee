"""Compiled, recomputed and offloaded layers beside plain ones: values, gradients, memory."""

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_memory import Peak
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from evolver_async.model import layers, policy
from evolver_async.model.cpu import lean
from evolver_async.model.rows.borders import Borders
from evolver_async.model.tokenizer import ModelError

HIDDEN, LAYERS = 16, 6


def made(count: int = LAYERS) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=count,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    return AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").eval()


def passed(model: PreTrainedModel, lengths: list[int]) -> dict[str, Tensor]:
    """The loss of a packed row, and the gradients of all weights."""
    model.zero_grad()
    tokens = torch.Generator().manual_seed(sum(lengths))
    tokens_1T = torch.randint(50, (1, sum(lengths)), generator=tokens)
    borders = Borders.of(lengths, torch.device("cpu"))
    loss = policy.hidden_states(model, tokens_1T, borders).square().mean()
    loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {name: one.clone() for name, one in found.items()} | {"loss": loss.detach()}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch needs a C++ compiler for the CPU")
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_have_the_gradients_of_plain_ones(tmp_path, monkeypatch):
    """Machine code for rows of any length, by which a copy computes with weights of its own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain, compiled = made(2), made(2)
    layers.compile_layers(compiled)
    copy = deepcopy(compiled)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.mul_(1.5)
    assert lean.acts(plain.base_model) and not lean.acts(compiled.base_model)
    for lengths in ([7, 5], [3, 11, 2]):
        expected = passed(plain, lengths)
        torch.testing.assert_close(passed(compiled, lengths), expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(passed(copy, lengths)["loss"], expected["loss"], rtol=1e-2)
    assert [*tmp_path.rglob("*.so")]


def test_compiled_code_is_kept_where_no_other_user_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    layers.keep_code()
    assert Path(cache_dir()).is_relative_to(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    layers.keep_code()
    assert cache_dir() == str(tmp_path / "own")


def test_layers_without_a_compiler_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-compiler-of-this-name",))
    torch._dynamo.reset()
    with pytest.raises(ModelError, match=r"learner\.compile"):
        layers.check_compiler("cpu")


def test_recomputed_layers_need_less_memory():
    model, tokens_BT = made(), torch.zeros(4, 64, dtype=torch.long)

    def needed() -> int:
        with Peak() as memory:
            policy.hidden_states(model, tokens_BT).sum().backward()
        model.zero_grad()
        return memory.most

    plain = needed()
    layers.checkpoint_layers(model)
    assert needed() < plain / 2


def test_nothing_but_the_inputs_of_layers_is_offloaded(monkeypatch):
    """Against what the hooks of torch see, which on a GPU take a tensor to the host."""
    packed, unpacked = list[Tensor](), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    def hooks(pin_memory: bool) -> Any:
        assert not pin_memory
        return saved_tensors_hooks(pack, unpack)

    monkeypatch.setattr(layers, "save_on_cpu", hooks)
    monkeypatch.setattr(lean, "acts", lambda decoder: False)
    kept, offloaded = made(), made()
    layers.checkpoint_layers(kept)
    layers.checkpoint_layers(offloaded, offload=True)
    lengths = [7, 5]
    expected = passed(kept, lengths)
    assert packed == []
    found = passed(offloaded, lengths)
    assert [one.shape for one in packed] == [(1, sum(lengths), HIDDEN)] * LAYERS
    assert len(unpacked) == LAYERS
    assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (layers.checkpoint_layers, r"learner\.gradient_checkpointing"),
        (layers.compile_layers, r"learner\.compile"),
    ],
)
def test_a_model_without_layers_is_refused(change, key):
    with pytest.raises(ModelError, match=key):
        change(torch.nn.Linear(2, 2))
