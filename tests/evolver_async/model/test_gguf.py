"""A run from a .gguf file: it is converted once, and all commands work with what it became."""

from pathlib import Path

import pytest
from numpy import float32, ones
from numpy.random import default_rng
from safetensors.torch import load_file
from transformers import AutoTokenizer

from evolver_async.cli import main
from evolver_async.config import ConfigError
from evolver_async.launch import resumption
from evolver_async.runs.results.loaded_run import load_run

pytestmark = pytest.mark.process

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RECIPE = """
env: {name: bandit, params: {high_probability: 0.5}}
policy: {max_length: 256, dtype: float32}
rollout: {format: chat, group_size: 4, max_turns: 1, max_tokens: 4}
actors: {count: 1, groups: 2}
buffer: {archive: all}
selection: {drop_zero: false, max_empty: 1000}
loss: {entropy_coef: 0.1}
learner: {groups_per_step: 2, minibatches: 1, lr: 1.0e-3, decay: none, token_budget: 4096}
stages: [{kind: rl, steps: 2}]
eval: {every: 0, episodes: 2, final_episodes: 2}
launch: {kind: serial}
metrics: {panel: none}
"""
HIDDEN, LAYERS, INNER = 16, 1, 32


def write(path: Path) -> None:
    """Write a random Llama of one layer whose tokens are bytes, as BPE without merges has them."""
    from gguf import GGUFWriter, TokenType  # pyright: ignore[reportMissingImports]
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*specials, *bytes_to_unicode().values(), "Ġa"]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    kinds = [TokenType.CONTROL] * len(specials)
    writer.add_token_types(kinds + [TokenType.NORMAL] * (len(tokens) - len(specials)))
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    draw = default_rng(0)
    shapes = {
        "token_embd": (len(tokens), HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.normal(0, 0.02, shape).astype(float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", ones(HIDDEN, float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_run_from_a_gguf_file_is_trained_resumed_repeated_evaluated_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, recipe, run = tmp_path / "model.gguf", tmp_path / "recipe.yaml", tmp_path / "run"
    write(file)
    recipe.write_text(RECIPE)
    of_run = f"policy.path={file}", f"run.dir={tmp_path}", "run.name=run"
    assert main(["train", str(recipe), *of_run]) == 0
    assert load_run(run).config.policy.path == str(run / "policy")
    with pytest.raises(ConfigError, match=r"^policy\.path: a \.gguf file is converted only when"):
        resumption.resume(run, [f"policy.path={file}"])
    file.rename(tmp_path / "moved.gguf")  # the run has its own copy
    assert main(["train", "--resume", str(run), "stages.0.steps=4"]) == 0
    assert len(load_run(run).steps) == 4
    capsys.readouterr()
    assert main(["rerun", str(run)]) == 0
    assert "bitwise equal: 4 steps" in capsys.readouterr().out
    assert main(["eval", str(run), "--episodes", "2"]) == 0
    bare = f"policy.path={tmp_path / 'moved.gguf'}"
    assert main(["eval", str(recipe), bare, "--episodes", "2"]) == 0
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    trained, converted = (
        load_file(d / "model.safetensors") for d in (tmp_path / "out", run / "policy")
    )
    assert trained.keys() == converted.keys()
    assert any((trained[name] != converted[name]).any() for name in trained)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode("a < b || c > d")) == "a < b || c > d"
