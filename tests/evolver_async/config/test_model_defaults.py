"""The layer of defaults for the model at hand: its values, what wins over it, refused rates."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from refusals import STEPS

from evolver_async.config import Config, ConfigError
from evolver_async.config.load import load, load_explained, to_yaml
from evolver_async.config.model_defaults import rate_of, said
from evolver_async.config.shape import DecoderShape, shape_of
from evolver_async.launch.start_checks import check_rates
from evolver_async.memory import host_memory
from evolver_async.memory.plan import memory_plan
from evolver_async.memory.units import GIB

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
QWEN_7B = SMOLLM2 | {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
ROOT = Path(__file__).parents[3]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The directory of a model with the sizes of SmolLM2-135M and without weights."""
    return made(tmp_path / "model", SMOLLM2)


def made(directory: Path, config: Mapping[str, object]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_the_model_wins_over_the_preset_the_recipe_over_the_model_and_arguments_over_all(
    model: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"policy: {{path: {model}}}\nlearner: {{minibatches: 4}}\n"
        "rollout: {max_turns: 1}\neval: {episodes: 99}\nstages: [{steps: 1}]\n"
    )
    config, reasons = load_explained(recipe, ["eval.episodes=7", "actors.count=2"])
    assert config.learner.lr == 1e-5
    assert config.rollout.max_tokens == 256
    assert config.policy.max_length == 1024
    assert config.buffer.max_staleness == 2
    assert (config.learner.minibatches, config.eval.episodes, config.actors.count) == (4, 7, 2)
    assert {"learner.lr", "engine.slots", "learner.token_budget"} <= reasons.keys()
    assert not {"learner.minibatches", "eval.episodes", "actors.count"} & reasons.keys()


def test_the_preset_has_the_defaults_of_the_sections() -> None:
    config, reasons = load_explained(None, [STEPS])
    assert reasons == {}
    assert config.learner == Config().learner and config.rollout == Config().rollout


def test_a_model_that_is_not_here_leaves_a_recipe_as_it_is() -> None:
    recipe = ROOT / "configs" / "gpu_node.yaml"
    assert load_explained(recipe)[1] == {}


@pytest.mark.parametrize(
    ("parameters", "rate"), [(0.26e6, 3.8e-4), (134.5e6, 1e-5), (1.5e9, 2.5e-6), (7.6e9, 1e-6)]
)
def test_the_rate_falls_with_the_number_of_parameters(parameters: float, rate: float) -> None:
    shape = DecoderShape(0, 1, 0, 1, 1, 1, int(parameters) - 1, tied=True)
    assert shape.parameters == int(parameters)
    assert rate_of(Config(), shape) == pytest.approx(rate, rel=0.05)


def test_adapters_have_a_rate_of_their_own(model: Path) -> None:
    config = load(None, [STEPS, f"policy.path={model}", "policy.lora.rank=16"])
    assert config.learner.lr == 1e-4


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (["learner.lr=5e-4"], "learner.lr: "),
        (["learner.lr=9e-5"], ""),
        (["learner.lr=5e-4", "safety.max_lr=inf"], ""),
        (["learner.lr=5e-4", "policy.lora.rank=8"], ""),
        (
            ["stages=[{steps: 1, override: {learner: {lr: 3e-3}}}]"],
            "stages[0].override.learner.lr: ",
        ),
        (["stages=[{kind: sft, steps: 1, override: {learner: {lr: 5e-4}}}]"], ""),
    ],
)
def test_a_rate_for_the_preset_is_refused_for_a_trained_model(
    model: Path, changes: Sequence[str], refused: str
) -> None:
    config = load(None, [STEPS, f"policy.path={model}", *changes])
    if not refused:
        check_rates(config)
        return
    with pytest.raises(ConfigError) as error:
        check_rates(config)
    assert str(error.value).startswith(refused)
    assert "1e-05" in str(error.value)


def test_the_recipe_of_the_preset_does_not_ruin_a_trained_model(model: Path) -> None:
    config = load(ROOT / "configs" / "frozen_lake.yaml", [f"policy.path={model}"])
    with pytest.raises(ConfigError, match=r"learner\.lr: .*entropy_coef.*max_tokens"):
        check_rates(config)


@pytest.mark.parametrize("changes", [[], ["policy.max_length=4096"], ["actors.count=2"]])
def test_135_million_parameters_fit_a_laptop_of_24_gib(model: Path, changes: list[str]) -> None:
    config = load(None, [STEPS, f"policy.path={model}", *changes])
    shape = shape_of(config)
    assert shape is not None and shape.parameters == 134_515_008
    plan = memory_plan(config, shape, learner_gpu=False, actor_gpu=False)
    assert plan.host < 18 * GIB, "the rest is for the system"


def test_adapters_are_proposed_where_full_training_does_not_fit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 8 * GIB)
    changes = [STEPS, f"policy.path={model}", f"weights.dir={tmp_path}"]
    with pytest.raises(ConfigError, match=r"policy\.lora\.rank=16 trains adapters"):
        host_memory.check_memory(load(None, changes))
    with pytest.raises(ConfigError) as error:
        host_memory.check_memory(load(None, [*changes, "policy.lora.rank=4"]))
    assert "trains adapters" not in str(error.value)


def test_full_context_of_ten_turns_recomputes_nothing_at_135_million(model: Path) -> None:
    config, reasons = load_explained(None, [STEPS, f"policy.path={model}"])
    assert (config.rollout.max_turns, config.rollout.context) == (10, "full")
    assert config.policy.max_length == config.learner.token_budget == 4096
    assert not config.learner.gradient_checkpointing
    assert "learner.gradient_checkpointing" not in reasons


def rows(directory: Path, prompts: Sequence[object], answer: str = "3") -> list[str]:
    """Changes for rows of these prompts."""
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps({"q": one, "answer": answer}) + "\n" for one in prompts))
    return [
        STEPS,
        "env.name=prompts",
        "rollout.max_turns=1",
        f"tasks.path={path}",
        "tasks.prompt=q",
    ]


def test_lengths_follow_from_the_rows(model: Path, tmp_path: Path) -> None:
    given = [f"policy.path={model}"]
    short = load(None, [*rows(tmp_path, ["abc" * 20, "a"]), *given])
    assert (short.policy.max_length, short.rollout.max_tokens) == (384, 256)
    named = load(None, [*rows(tmp_path, ["abc"]), *given, "rollout.max_tokens=16"])
    assert (named.policy.max_length, named.rollout.max_tokens) == (256, 16)
    messages = [
        {"role": "user", "content": "abc" * 1000},
        {"role": "user", "content": "abc" * 4000},
    ]
    long = load(None, [*rows(tmp_path, [messages, "a"]), *given])
    assert 5000 * 1.25 + 256 < long.policy.max_length <= long.learner.token_budget
    worked, reasons = load_explained(None, [*rows(tmp_path, ["abc"], "abc" * 200), *given])
    assert worked.rollout.max_tokens == 448
    assert "200 tokens" in reasons["rollout.max_tokens"]


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_rows_of_other_files_have_lengths(model: Path, tmp_path: Path, kind: str) -> None:
    from datasets import Dataset

    path = tmp_path / "rows.parquet"
    made = Dataset.from_list([{"q": "abc" * 20, "answer": "3"}] * 3)
    if kind == "parquet":
        made.to_parquet(path)
    else:
        made.save_to_disk(path := tmp_path / "rows")
    tasks = ["env.name=prompts", "rollout.max_turns=1", f"tasks.path={path}", "tasks.prompt=q"]
    config = load(None, [STEPS, f"policy.path={model}", *tasks])
    assert config.policy.max_length == 384


@pytest.mark.parametrize("text", ["", "no json\n", '{"other": 1}\n', '[1, 2]\n"a"\n', None])
def test_rows_that_cannot_be_read_leave_the_lengths_of_the_model(
    model: Path, tmp_path: Path, text: str | None
) -> None:
    changes = [*rows(tmp_path, ["abc"]), f"policy.path={model}"]
    if text is None:
        (tmp_path / "rows.jsonl").unlink()
        (model / "tokenizer.json").write_text("{}")
    else:
        (tmp_path / "rows.jsonl").write_text(text)
    assert load(None, changes).policy.max_length == 1024


def test_rows_are_sampled_all_over_a_large_file(model: Path, tmp_path: Path) -> None:
    prompts = ["abc"] * 200_000
    prompts[100_005] = "abc" * 50  # in the middle, where a piece begins
    assert load(None, [*rows(tmp_path, prompts), f"policy.path={model}"]).policy.max_length == 448


def test_a_large_model_recomputes_layers_and_has_few_slots_and_checkpoints(tmp_path: Path) -> None:
    path = made(tmp_path / "large", QWEN_7B)
    turns = "rollout.max_turns=1"
    config = load(None, [STEPS, f"policy.path={path}", turns])
    small = load(None, [STEPS, f"policy.path={made(tmp_path / 'small', SMOLLM2)}", turns])
    assert config.learner.lr == 1e-6
    assert config.learner.gradient_checkpointing and not small.learner.gradient_checkpointing
    assert config.engine.slots < 64
    assert config.checkpoint.every == 5 * small.checkpoint.every
    assert config.checkpoint.every % config.eval.every == 0


def test_the_context_is_at_most_the_models_positions(tmp_path: Path) -> None:
    path = made(tmp_path / "short", SMOLLM2 | {"max_position_embeddings": 300})
    config = load(None, [STEPS, f"policy.path={path}"])
    assert (config.policy.max_length, config.rollout.max_tokens) == (300, 150)


def test_experts_count_as_parameters_and_those_that_are_not_active_keep_nothing(
    tmp_path: Path,
) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 100}
    config = load(None, [STEPS, f"policy.path={made(tmp_path / 'moe', SMOLLM2 | experts)}"])
    shape, dense = shape_of(config), shape_of(Config())
    assert shape is not None and dense is not None
    assert shape.layer == 576 * (2 * 576 + 2 * 192 + 8 * 3 * 100 + 8) + 2 * 576
    assert shape.activations == 6 * 576 + 5 * 576 + 4 * 192 + 4 * 100 * 2


def test_every_default_is_named_with_its_reason(model: Path, tmp_path: Path) -> None:
    config, reasons = load_explained(None, [STEPS, f"policy.path={model}"])
    text = to_yaml(config, reasons)
    assert "\n  lr: 1.0e-05  # model: 135M, full training\n" in text
    assert text.count("  # model: ") == len(reasons)
    (tmp_path / "again.yaml").write_text(text)
    assert load(tmp_path / "again.yaml") == config
    lines = " ".join(line.strip() for line in said(config, reasons))
    assert all(f"{key}=" in lines for key in reasons)


def test_a_gguf_file_has_the_sizes_in_its_head(tmp_path: Path) -> None:
    from gguf import GGUFWriter  # pyright: ignore[reportMissingImports]
    from numpy import zeros

    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_types([1, 1, 1])
    writer.add_bool("flag", True)
    writer.add_tensor("token_embd.weight", zeros((3, 32), "float32"))
    writer.add_tensor("blk.0.attn_q.bias", zeros(32, "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = load(None, [STEPS, f"policy.path={path}"])
    expected = DecoderShape(
        *(2, 32, 96, 4, 2, 8, 3), tied=True, biased=True, stored="float32", positions=512
    )
    assert shape_of(config) == expected
    assert config.policy.max_length == 512
    (tmp_path / "text.gguf").write_text("no model")
    assert shape_of(load(None, [STEPS, f"policy.path={tmp_path / 'text.gguf'}"])) is None
