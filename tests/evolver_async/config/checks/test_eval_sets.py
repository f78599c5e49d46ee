"""Sets of evaluation episodes that cannot work, each refused by its key before the start."""

from pathlib import Path

import pytest
from refusals import refusal

from evolver_async.config.load import dump, from_dict, load, stage_config, to_dict

STAGE = "stages=[{kind: rl, steps: 9}]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval.sets.a-b.tasks=4"], "eval.sets.a-b: must be named by a plain identifier"),
        (["eval.sets.a.k=4"], "eval.sets.a.k: must be 1: at temperature 0"),
        (["eval.sets.a.k=0"], "eval.sets.a.k: must be at least 1"),
        (["eval.sets.a.tasks=0"], "eval.sets.a.tasks: must be at least 1"),
        (["eval.sets.a.temperature=-1"], "eval.sets.a.temperature: must be at least 0"),
        (
            ["eval.sets.a.split=dev"],
            "eval.sets.a.split: must be one of auto, train, validation, test",
        ),
        (["eval.sets.a.episodes=4"], "eval.sets.a.episodes: unknown key"),
        (["eval.sets.a.env.parms={}"], "eval.sets.a.env.parms: unknown key"),
        (["eval.sets.a=4"], "eval.sets.a: must be a mapping"),
        (["eval.sets.a.every=30"], "eval.sets.a.every: must be a multiple of eval.every (25)"),
        (
            ["eval.sets.a.guided=true", "experience.kind=own:f", "rollout.agent=own:f"],
            "eval.sets.a.guided: must be false",
        ),
        (["eval.sets.a.env.params.x=.inf"], "eval.sets.a.env.params.x: must be finite"),
        (
            ["eval.sets.a.env.params.x=1", "tasks.mixture=[{env: bandit}]"],
            "eval.sets.a.env.params: need eval.sets.a.env.name: tasks.mixture",
        ),
        (
            ["eval.sets.a.temperature=0.001", "engine={kind: vllm, device: cuda}"],
            "eval.sets.a.temperature: must be at least 0.01",
        ),
        (["eval.sets.a.env.params.api_key=abc"], "eval.sets.a.env.params.api_key: looks like"),
    ],
)
def test_a_set_that_cannot_work_is_refused_by_its_key(arguments: list[str], message: str) -> None:
    assert message in refusal(*arguments)


def test_sets_survive_the_file_and_the_wire(tmp_path: Path) -> None:
    config = load(
        None,
        [
            STAGE,
            "eval.sets.a={k: 4, temperature: 1.0, tasks: 8, first: 3, every: 50}",
            "eval.sets.b.env={name: bandit, params: {low: 0.1}}",
        ],
    )
    dump(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config == from_dict(to_dict(config))
    assert list(config.eval.sets) == ["a", "b"]


def test_another_environment_drops_the_sets_that_change_the_one_before() -> None:
    sets = "eval.sets={a: {env: {params: {slippery: true}}}, b: {env: {name: bandit}}}"
    assert list(load(None, [STAGE, "env.name=cliff_walking", sets]).eval.sets) == ["a", "b"]
    config = load(None, [f"{STAGE[:-2]}, override: {{env: {{name: sokoban}}}}}}]", sets])
    assert list(config.eval.sets) == ["a", "b"]
    assert list(stage_config(config, 0).eval.sets) == ["b"]


def test_another_environment_of_a_set_drops_its_parameters(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("eval: {sets: {a: {env: {name: bandit, params: {low: 0.1}}, tasks: 5}}}")
    config = load(base, [STAGE, "eval.sets.a.env.name=sokoban"])
    assert (config.eval.sets["a"].env.params, config.eval.sets["a"].tasks) == ({}, 5)
