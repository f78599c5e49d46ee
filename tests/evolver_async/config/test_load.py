"""Recipes, bases and arguments: what wins, and mistakes that are named by their key."""

import cProfile
import json
import math
import pstats
import tempfile
from pathlib import Path

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import STEPS, refusal

from evolver_async.config import Config, ConfigError, EnvConfig, StageConfig
from evolver_async.config import load as load_module
from evolver_async.config.load import dump, from_dict, load, stage_config, to_dict
from evolver_async.config.sections.rollout import RolloutConfig

CONFIGS = Path(__file__).parents[3] / "configs"


def test_arguments_win_over_the_recipe_and_the_recipe_over_the_defaults(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learner: {lr: 1e-3, minibatches: 2}\nstages: [{kind: rl, steps: 7}]\n")
    config = load(recipe, ["learner.lr=2e-3", "env.params.size=4"])
    assert config.learner.lr == 2e-3
    assert config.learner.minibatches == 2
    assert config.learner.grad_clip == Config().learner.grad_clip
    assert config.env.params == {"size": 4}
    assert config.stages == [StageConfig(kind="rl", steps=7)]


def test_another_environment_drops_the_parameters_of_the_one_below(tmp_path: Path) -> None:
    (tmp_path / "low.yaml").write_text(
        "env: {name: first, params: {size: 4, grid: words}}\nstages: [{steps: 1}]\n"
    )
    top, same = tmp_path / "top.yaml", tmp_path / "same.yaml"
    top.write_text("base: low.yaml\nenv: {name: second, params: {limit: 9}}\n")
    same.write_text("base: low.yaml\nenv: {name: first, params: {limit: 9}}\n")
    assert load(top).env.params == {"limit": 9}
    assert load(same).env.params == {"size": 4, "grid": "words", "limit": 9}
    assert load(same, ["env.name=first"]).env.params == load(same).env.params
    assert load(same, ["env.name=third"]).env.params == {}
    assert load(same, ["env={name: third, params: {a: 1}}"]).env.params == {"a": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        ["env.name=second", "env.params={limit: 20}", "env.params.low=1"],
        ["env.params.low=1", "env.name=second", "env.params={limit: 20}"],
        ["env[params]={limit: 20, low: 1}", "env={name: second}"],
        ["env={params: {limit: 20}}", "env={name: second, params: {low: 0}}", "env.params.low=1"],
    ],
)
def test_parameters_are_those_of_the_environment_named_in_whatever_order(
    tmp_path: Path, arguments: list[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("env: {name: first, params: {size: 4}}\nstages: [{steps: 1}]\n")
    config = load(recipe, arguments)
    assert (config.env.name, config.env.params) == ("second", {"limit": 20, "low": 1})


def test_a_stage_with_another_environment_has_parameters_of_its_own(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "env: {name: first, params: {size: 4, grid: words}}\n"
        "stages: [{steps: 1, override: {env: {name: second, params: {limit: 9}}}},"
        " {steps: 1, override: {env: {params: {size: 6}}}}]\n"
    )

    def params(*more: str) -> list[dict[str, object]]:
        config = load(recipe, more)
        return [stage_config(config, index).env.params for index in range(2)]

    assert params() == [{"limit": 9}, {"size": 6, "grid": "words"}]
    third = ["stages.0.override.env.params.low=1", "stages.0.override.env.name=third"]
    assert params(*third)[0] == {"low": 1}
    assert params("stages.0.override.env.name=second")[0] == {"limit": 9}
    assert params("stages.1.override={env: {name: third}}")[1] == {}
    assert params("env={name: third, params: {limit: 20}}")[1] == {"limit": 20}
    late = ["stages.1.override={env: {params: {low: 1}}}", "stages.1.override.env.name=third"]
    assert params(*late)[1] == {"low": 1}


def test_what_is_no_environment_in_a_stage_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("stages: [{steps: 1, override: {env: ice}}]\n")
    with pytest.raises(ConfigError, match=r"^stages\[0\]\.override: env: must be a mapping"):
        load(tmp_path / "recipe.yaml", ["env.name=other"])


def test_the_last_of_several_arguments_wins() -> None:
    config = load(None, [STEPS, "env.params.size=9", "env={name: other, params: {size: 5}}"])
    assert config.env.params == {"size": 5}


def test_an_argument_about_a_stage_leaves_references_in_it(monkeypatch) -> None:
    monkeypatch.setenv("SERVER", "http://here")
    stages = "stages=[{steps: 1, override: {env: {params: {url: '${oc.env:SERVER}'}}}}]"
    config = load(None, [stages, "stages.0.steps=3"])
    assert config.stages[0].steps == 3
    assert config.stages[0].override["env"]["params"]["url"] == "${oc.env:SERVER}"


@pytest.mark.parametrize("text", ["0123", "1e5", "on", "/tmp/a #b", "a: b", "{x}", "*a", " a"])
def test_the_text_of_an_argument_is_kept(text: str) -> None:
    config = load(None, [STEPS, f"run.dir={text}", f"stages.0.override.env.name={text}"])
    assert config.run.dir == text
    assert stage_config(config, 0).env.name == text
    quoted = load(None, [STEPS, f"run.dir={json.dumps(text)}", f"env.params.word='{text}'"])
    assert (quoted.run.dir, quoted.env.params) == (text, {"word": text})


def test_choices_are_texts_and_parameters_are_yaml() -> None:
    assert load(None, [STEPS, "env.params.on=on"]).env.params == {"on": True}
    assert refusal("learner.decay=off").endswith("is 'off'")


def test_a_recipe_that_is_no_text_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match=r"recipe\.yaml: byte 3 is not UTF-8 text$"):
        load(recipe)
    recipe.write_bytes(b"a: \x00\x01")
    with pytest.raises(ConfigError, match=r"recipe\.yaml: not valid YAML: "):
        load(recipe)


def test_a_stage_can_be_appended() -> None:
    config = load(None, [STEPS, "stages+={kind: sft, steps: 4}", "stages.1.expert_fraction=0.5"])
    assert [(stage.kind, stage.steps) for stage in config.stages] == [("rl", 10), ("sft", 4)]
    assert config.stages[1].expert_fraction == 0.5


@pytest.mark.parametrize("text", ["learner: [", "- a\n- b\n", "learner: {lr: 1}\nlearner: {}\n"])
def test_a_recipe_that_is_no_mapping_is_named(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=str(recipe)):
        load(recipe, [])
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        load(tmp_path / "missing.yaml", [])


def test_a_dumped_configuration_loads_back_equal(tmp_path: Path) -> None:
    config = load(None, [STEPS, "correction.w_max=inf", "env.params={size: 4, names: [a, b]}"])
    dump(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml", []) == config


def test_the_plain_dict_form_is_finite_and_loads_back_equal() -> None:
    config = load(None, [STEPS, "correction.w_max=inf", "env.params={size: 4}"])
    plain = to_dict(config)
    assert plain["correction"]["w_max"] == "inf"
    restored = from_dict(plain)
    assert restored == config
    assert math.isinf(restored.correction.w_max)


TEXTS = st.lists(st.sampled_from(["${", "}", "\\", "$", "{", "oc.env:HOME", "name", " ", "'"]))


@settings(max_examples=examples(15))
@given(TEXTS.map("".join), TEXTS.map("".join))
def test_a_text_with_an_opening_of_a_reference_reads_back_equal(text: str, other: str) -> None:
    parameter = other.replace("oc.env:", "")  # a reference would stay one
    config = Config(
        rollout=RolloutConfig(system_prompt=text),
        env=EnvConfig(params={"word": [parameter]}),
        stages=[
            StageConfig(steps=1, override={"rollout": {"max_turns": 3}}),
            StageConfig(steps=1, override={"rollout": {"system_prompt": parameter}}),
        ],
    )
    assert from_dict(to_dict(config)) == config
    with tempfile.TemporaryDirectory() as directory:
        dump(config, Path(directory) / "config.yaml")
        assert load(Path(directory) / "config.yaml") == config
    assert stage_config(config, 0).rollout.system_prompt == text
    assert stage_config(config, 1).rollout.system_prompt == parameter


def test_a_long_text_is_read_from_the_command_line() -> None:
    long = "rules " * 10_000
    assert load(None, [STEPS, f"rollout.system_prompt={long!r}"]).rollout.system_prompt == long


def test_an_escaped_reference_is_text_in_every_stage(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "rollout: {system_prompt: 'Say \\${name}'}\n"
        "stages: [{steps: 1, override: {rollout: {max_turns: 3}}}]\n"
    )
    config = load(recipe)
    dump(config, tmp_path / "config.yaml")
    for one in (config, load(tmp_path / "config.yaml")):
        assert stage_config(one, 0).rollout.system_prompt == "Say ${name}"


def test_a_reference_to_another_key_has_the_type_of_its_own_key(monkeypatch) -> None:
    monkeypatch.setenv("RATE", "1.375e-3")  # errors of later tests show no such number
    arguments = [
        "learner.minibatches='${eval.every}'",
        "learner.lr='${oc.env:RATE}'",
        "learner.betas='${.other}'",
        "run.name='${run.seed}-${env.name}'",
        "selection={kind: 'own:f', params: '${judge.params}'}",
        "judge={kind: 'own:g', params: {words: [a, b], depth: {n: 2}}}",
    ]
    config = load(None, [STEPS, *(one for one in arguments if "other" not in one)])
    assert (config.learner.minibatches, config.learner.lr) == (25, 1.375e-3)
    assert config.run.name == "0-frozen_lake"
    assert config.selection.params == {"words": ["a", "b"], "depth": {"n": 2}}
    with pytest.raises(ConfigError, match=r"^learner\.betas: .*other"):
        load(None, [STEPS, *arguments])


def test_what_is_done_to_a_configuration_changes_no_other_of_the_same_recipe(tmp_path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("env: {params: {map: [1, 2]}}\nstages: [{steps: 1}]\n")
    load(recipe).env.params["map"].append(3)
    stage_config(load(recipe), 0).loss.clip_low = 0.0
    assert load(recipe).env.params == {"map": [1, 2]}
    assert stage_config(load(recipe), 0).loss.clip_low > 0


def test_a_stage_is_checked_once_for_configurations_of_the_same_values() -> None:
    config = load(None, [STEPS, "run.seed=81"])
    made = load_module._changed.cache_info().misses
    assert stage_config(config, 0) == stage_config(load(None, [STEPS, "run.seed=81"]), 0)
    assert load_module._changed.cache_info().misses == made
    config.learner.lr = 0.25
    assert stage_config(config, 0).learner.lr == 0.25


def test_a_recipe_is_loaded_in_few_calls() -> None:
    """Thousands of tests and every command wait for it; calls do not depend on the machine."""
    load(CONFIGS / "agentevolver.yaml")
    profile = cProfile.Profile()
    profile.runcall(load, CONFIGS / "agentevolver.yaml", ["run.seed=82"])
    assert pstats.Stats(profile).total_calls < 40_000  # pyright: ignore[reportAttributeAccessIssue]


def test_a_recipe_says_what_differs_from_its_base(tmp_path):
    (tmp_path / "low.yaml").write_text("learner: {lr: 0.5, minibatches: 2}\nrun: {seed: 3}\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "mid.yaml").write_text("base: ../low.yaml\nlearner: {lr: 0.25}\n")
    (tmp_path / "top.yaml").write_text("base: deep/mid.yaml\nrun: {seed: 4}\n")
    config = load(tmp_path / "top.yaml", [STEPS, "learner.minibatches=1"])
    assert (config.learner.lr, config.learner.minibatches, config.run.seed) == (0.25, 1, 4)


@pytest.mark.parametrize(
    "base, message",
    [
        ("missing.yaml", "missing.yaml: No such file"),
        ("b.yaml", "based on this very"),
        ("[1]", "path"),
    ],
)
def test_a_base_that_cannot_be_is_named(tmp_path, base, message):
    (tmp_path / "a.yaml").write_text(f"base: {base}\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "a.yaml", [])


RECIPES = sorted({*CONFIGS.rglob("*.yaml")} - {*CONFIGS.glob("studies/*")})


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_is_short(recipe: Path) -> None:
    load(recipe)
    assert len(recipe.read_text().splitlines()) <= 40


GPU_METHODS = ("dapo", "grpo_roc", "retool", "starpo_s", "webshop")


@pytest.mark.parametrize("name", ["agentevolver_7b", *(f"gpu/{name}" for name in GPU_METHODS)])
def test_recipes_of_published_runs_keep_the_optimizer_of_these(name: str) -> None:
    config = load(CONFIGS / f"{name}.yaml")
    for index in range(len(config.stages)):
        learner = stage_config(config, index).learner
        assert (learner.lr, learner.decay) == (1e-6, "none")
        assert (learner.betas, learner.grad_clip) == ([0.9, 0.999], 1.0)


@pytest.mark.parametrize("name, kept", [("starpo_s", 0.25), ("webshop", 1.0)])
def test_starpo_s_plays_128_episodes_a_step_and_trains_them_by_32(name: str, kept: float) -> None:
    config = load(CONFIGS / "gpu" / f"{name}.yaml")
    episodes = config.rollout.group_size * config.learner.groups_per_step
    assert episodes == 128
    assert kept * episodes / config.learner.minibatches == 32


def test_the_recipe_of_process_rewards_has_several_turns() -> None:
    """A single turn has the reward of its whole episode: the estimator would be that of `grpo`."""
    config = load(CONFIGS / "deepseekmath_grpo.yaml")
    assert config.advantage.kind == "grpo_process" and config.rollout.max_turns > 1
