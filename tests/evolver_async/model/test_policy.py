"""The policy loads any causal-LM directory, the tiny preset included, and scores tokens exactly."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import SHAPE, SIZES, TOKENIZER
from transformers import (
    CohereConfig,
    Gemma2Config,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

from evolver_async.model.attention import packed_attention
from evolver_async.model.policy import (
    ModelError,
    export,
    fuse_norms,
    load_model,
    load_state,
    load_tokenizer,
    make_tiny,
    state_tensors,
    token_logprobs,
    tokenizer_hash,
)
from evolver_async.model.tiny import CAPITALISED, TAGS, WORDS


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny(directory, seed=0, **SIZES)
    return directory


@pytest.fixture(scope="module", params=["tiny", "qwen2_tied", "llama"])
def directory(request, tiny, tmp_path_factory) -> Path:
    if request.param == "tiny":
        return tiny
    configs = {
        "qwen2_tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
        "llama": LlamaConfig(**SHAPE),
    }
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp(request.param)
    export(AutoModelForCausalLM.from_config(configs[request.param]), path, tiny)
    return path


def load(directory: Path):
    return load_model(directory, dtype="float32", device="cpu")


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def full_logprobs(model, tokens_BT, temperature, top_k):
    """The oracle, all positions: the entropy with the gradient of the `top_k` likeliest tokens."""
    logps = (model(tokens_BT).logits.float() / temperature).log_softmax(-1)[:, :-1]
    picked = logps.gather(-1, tokens_BT[:, 1:, None])[..., 0]
    likeliest = logps.exp().sort(descending=True).values[..., :top_k]
    shares = likeliest / likeliest.sum(-1, keepdim=True)
    entropy = -(shares * shares.log()).sum(-1)
    entropy.data = -(logps.exp() * logps).sum(-1).data
    return tuple(torch.nn.functional.pad(part, (1, 0)) for part in (picked, entropy))


@given(st.text())
def test_every_string_can_be_written_and_read(text):
    assert TOKENIZER.decode(ids(text)) == text


def test_words_glyphs_and_tags_cost_one_token():
    words = [*WORDS.split(), *(word.capitalize() for word in CAPITALISED.split())]
    for piece in [*words, *"PSFHGO_.#0123456789|,:;/", "||"]:
        assert len(ids(piece)) == len(ids(f" {piece}")) == 1, piece
    for piece in [*TAGS, "<|user|>", "<|end|>", "<|endoftext|>", "\n"]:
        assert len(ids(piece)) == 1, piece
    assert len(ids("<answer>left</answer>")) == 3
    assert len(ids("<answer> left || down</answer>")) == 5
    assert len(ids("P_O\nrow 0 column 2")) == 8


def test_chat_template_is_chatml():
    messages = [{"role": "system", "content": "walk"}, {"role": "user", "content": "row 0"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<|system|>walk<|end|><|user|>row 0<|end|><|assistant|>")


def test_tiny_is_small_complete_and_made_by_its_seed(tiny, tmp_path):
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 192, "max_length": 1024}
    make_tiny(tmp_path / "a", seed=1, **sizes)
    make_tiny(tmp_path / "b", seed=1, **sizes)
    make_tiny(tmp_path / "c", seed=2, **sizes)
    a, b, c = (state_tensors(load(tmp_path / name)) for name in "abc")
    assert sum(tensor.numel() for tensor in a.values()) <= 1_000_000
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
    assert a["lm_head.weight"].std() == pytest.approx(0.05, rel=0.05)
    model, tokenizer = load(tmp_path / "a"), load_tokenizer(tmp_path / "a")
    assert model.config.vocab_size == len(tokenizer) == len(TOKENIZER)
    assert model.config.max_position_embeddings == 1024
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()


def test_exported_directory_is_the_same_policy(directory, tmp_path):
    model = load(directory)
    with torch.no_grad():
        for tensor in state_tensors(model).values():
            tensor.add_(0.01)
    export(model, tmp_path, directory)
    assert tokenizer_hash(tmp_path) == tokenizer_hash(directory)
    assert load_tokenizer(tmp_path).chat_template == TOKENIZER.chat_template
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 4)])
def test_chunked_logprobs_equal_full_ones_with_gradients(directory, temperature, top_k):
    model = load(directory).double()  # sums in another order: float32's rounding would show
    tokens_BT = torch.randint(0, len(TOKENIZER), (3, 17), generator=torch.manual_seed(0))
    lengths = torch.tensor([17, 9, 13])
    mask_BT = torch.arange(17) < lengths[:, None]
    select_BT = mask_BT & (torch.arange(17) % 3 != 1)
    select_BT[:, 0] = False
    weight_BT = torch.randn(3, 17, generator=torch.manual_seed(1)) * select_BT

    def gradients(logprobs_BT, entropy_BT):
        model.zero_grad()
        (weight_BT * (logprobs_BT + 0.3 * entropy_BT)).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    oracle = full_logprobs(model, tokens_BT, temperature, top_k or len(TOKENIZER))
    expected = gradients(*oracle)
    for chunk in (4, 1000):
        got = token_logprobs(
            model,
            tokens_BT,
            mask_BT,
            temperature,
            chunk,
            select_BT=select_BT,
            with_entropy=True,
            entropy_top_k=top_k,
        )
        for mine, theirs in zip(got, oracle, strict=True):
            assert torch.allclose(mine, theirs * select_BT, atol=1e-6)
            assert not mine[~select_BT].any()
        for mine, theirs in zip(gradients(*got), expected, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6 + 1e-6 * theirs.abs().max())


@pytest.mark.parametrize("biased", [False, True])
def test_gradients_of_many_chunks_in_a_short_type_are_added_in_float32(tiny, biased):
    """Added in bfloat16 one by one, 255 chunks lose what is small against the sum so far."""
    model, short = load(tiny), load(tiny)
    if biased:
        for one in (model, short):
            one.lm_head.bias = torch.nn.Parameter(torch.linspace(-3, 3, len(TOKENIZER)))
    tokens_BT = torch.randint(0, len(TOKENIZER), (8, 128), generator=torch.manual_seed(0))
    mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    hidden_BTD = torch.randn(8, 128, 32, generator=torch.manual_seed(1)) + 0.5

    def gradient(model, hidden_BTD, chunk):
        hidden_BTD = hidden_BTD.clone().requires_grad_()
        got, entropy = token_logprobs(
            model, tokens_BT, mask_BT, chunk=chunk, hidden_BTD=hidden_BTD, with_entropy=True
        )
        (got + 0.1 * entropy).sum().backward()
        head = model.get_output_embeddings()
        found = [head.weight.grad.float(), hidden_BTD.grad.float(), got.detach()]
        if biased:
            found.append(head.bias.grad.float())
        model.zero_grad()
        return found

    exact, hidden_exact, _, *bias_exact = gradient(model, hidden_BTD.bfloat16().float(), 4096)
    short.bfloat16()
    rounded, _, logprobs, *_ = gradient(short, hidden_BTD.bfloat16(), 4096)
    chunked, hidden_chunked, logprobs_chunked, *bias = gradient(short, hidden_BTD.bfloat16(), 4)

    def off(got, expected):
        return float((got - expected).norm() / expected.norm())

    # The product of each chunk is rounded as well, which adds as much again.
    assert off(chunked, exact) < 1.5 * off(rounded, exact)
    assert torch.equal(logprobs_chunked, logprobs)
    assert off(hidden_chunked, hidden_exact) < 0.02
    assert all(off(*pair) < 0.1 for pair in zip(bias, bias_exact, strict=True))


def test_padding_and_empty_selection_change_nothing(directory):
    model = load(directory)
    tokens_BT = torch.randint(0, len(TOKENIZER), (2, 12), generator=torch.manual_seed(0))
    mask_BT = torch.ones(2, 12, dtype=torch.bool)
    mask_BT[1, 7:] = False
    padded, entropy = token_logprobs(model, tokens_BT, mask_BT)
    alone, _ = token_logprobs(model, tokens_BT[1:, :7], mask_BT[1:, :7])
    assert torch.allclose(padded[1, :7], alone[0], atol=1e-6) and not padded[1, 7:].any()
    assert not padded[:, 0].any() and not entropy.any()
    nothing, _ = token_logprobs(model, tokens_BT, mask_BT, select_BT=torch.zeros_like(mask_BT))
    nothing.sum().backward()
    assert not nothing.any()


def test_state_tensors_are_unique_and_loading_them_reaches_the_head(directory):
    model, tokens = load(directory), torch.arange(10)[None]
    state = state_tensors(model)
    pointers = [tensor.data_ptr() for tensor in state.values()]
    assert len(set(pointers)) == len(pointers)
    assert sum(t.numel() for t in state.values()) == sum(p.numel() for p in model.parameters())
    other = load(directory)
    changed = {name: tensor * 1.5 for name, tensor in state.items()}
    load_state(other, changed)
    head = other.get_output_embeddings().weight
    assert torch.equal(head, model.get_output_embeddings().weight * 1.5)
    with torch.no_grad():
        assert not torch.allclose(other(tokens).logits, model(tokens).logits)


def test_unfitting_weights_are_refused_and_nothing_is_copied(tiny):
    model = load(tiny)
    state = {name: tensor + 1 for name, tensor in state_tensors(model).items()}
    before = {name: tensor.clone() for name, tensor in state_tensors(model).items()}
    missing = {name: tensor for name, tensor in state.items() if name != "model.norm.weight"}
    for bad, message in (
        (missing, "model.norm.weight is missing"),
        (state | {"surplus": torch.zeros(1)}, "surplus is unknown"),
        (state | {"model.norm.weight": torch.zeros(3)}, r"model.norm.weight has shape \[3\]"),
    ):
        with pytest.raises(ModelError, match=message):
            load_state(model, bad)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_tensors(model).items())


def test_bad_directories_are_refused_by_name(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "bare")
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (tmp_path / "bare" / name).unlink()
        loader = load_tokenizer if name == "tokenizer.json" else load
        with pytest.raises(ModelError, match=rf"{tmp_path}/bare has no .*{name.split('.')[1]}"):
            loader(tmp_path / "bare")
    with pytest.raises(ModelError, match=r"nowhere has no tokenizer\.json"):
        tokenizer_hash(tmp_path / "nowhere")
    shutil.copytree(tiny, tmp_path / "mute")
    (tmp_path / "mute" / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="mute has no chat template"):
        load_tokenizer(tmp_path / "mute")
    with pytest.raises(ModelError, match=r"policy\.hidden_size: .* is 36"):
        make_tiny(tmp_path / "odd", seed=0, **SIZES | {"hidden_size": 36})


@pytest.mark.process
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Gemma2Config(**SHAPE, attn_logit_softcapping=None), "transforms its logits"),
        (Gemma2Config(**SHAPE, final_logit_softcapping=None), "attn_logit_softcapping"),
        (CohereConfig(**SHAPE, logit_scale=0.25), "transforms its logits"),
        (GraniteConfig(**SHAPE, logits_scaling=4.0), "transforms its logits"),
        (Gemma2Config(**SHAPE, attn_logit_softcapping=None, final_logit_softcapping=None), ""),
    ],
)
def test_logits_and_scores_that_are_not_plain_are_refused_of_a_fresh_model_too(
    config, said, tiny, tmp_path
):
    torch.manual_seed(0)
    export(AutoModelForCausalLM.from_config(config), tmp_path, tiny)
    if not said:
        load(tmp_path)
        return
    with pytest.raises(ModelError, match=said):
        load(tmp_path)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_packed_attention_refuses_what_it_does_not_compute(name):
    part = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ModelError, match=name):
        packed_attention(torch.nn.Module(), part, part, part, None, scaling=1.0, **{name: part})


def test_tokenizers_differ_by_fingerprint_and_need_no_torch(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "other")
    template = tmp_path / "other" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert tokenizer_hash(tiny) != tokenizer_hash(tmp_path / "other")
    shutil.copytree(tiny, tmp_path / "endless")
    config = tmp_path / "endless" / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"<|end|>"', '"<|endoftext|>"'))
    assert load_tokenizer(tmp_path / "endless").eos_token != load_tokenizer(tiny).eos_token
    assert tokenizer_hash(tiny) != tokenizer_hash(tmp_path / "endless")
    code = (
        "import sys; from evolver_async.model.tokenizer import tokenizer_hash\n"
        "print(tokenizer_hash(sys.argv[1]), 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code, tiny], capture_output=True, text=True)
    assert run.stdout.split() == [tokenizer_hash(tiny), "False"], run.stderr


@pytest.mark.parametrize(
    ("shape", "fused"),
    [
        (LlamaConfig(**SHAPE), 1 + 2 * SHAPE["num_hidden_layers"]),
        (Qwen3Config(**SHAPE), 1 + 4 * SHAPE["num_hidden_layers"]),
        (GemmaConfig(**SHAPE), 0),
    ],
    ids=["llama", "qwen3", "gemma"],
)
def test_fused_norms_have_the_values_and_gradients_of_those_they_replace(shape, fused):
    model = AutoModelForCausalLM.from_config(shape)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, 1.0, 0.3)
    other = copy.deepcopy(model)
    fuse_norms(other)
    assert sum(isinstance(one, torch.nn.RMSNorm) for one in other.modules()) == fused
    tokens_BT = torch.randint(0, 50, (2, 9), generator=torch.manual_seed(0))
    found = []
    for one in (model, other):
        logits = one(tokens_BT).logits
        logits.square().mean().backward()
        found.append([logits, *(parameter.grad for parameter in one.parameters())])
    assert model.state_dict().keys() == other.state_dict().keys()
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
