"""Sets of evaluation episodes that cannot work, each refused by its key before the start."""

from pathlib import Path

from evolver_async.config.load import dump, from_dict, load, stage_config, to_dict

STAGE = "stages=[{kind: rl, steps: 9}]"


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
