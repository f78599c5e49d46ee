"""Definitions of studies: what is read from arguments and YAML, and what is refused."""

from pathlib import Path

import pytest

from evolver_async.config import ConfigError
from evolver_async.config.arguments import flow
from evolver_async.metrics.families import EVAL_METRICS
from evolver_async.study import definition as definitions
from evolver_async.study.cells import cells_of, cold_stages, configs_of, short_names
from evolver_async.study.definition import (
    Definition,
    Threshold,
    parse_seeds,
    parse_threshold,
    split_values,
    with_arguments,
)
from evolver_async.study.directory import Study, cold_run, command_of, runs_of

ROOT = Path(__file__).parents[3]
STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0..4", (0, 1, 2, 3, 4)), ("3", (3,)), ("0,2,5", (0, 2, 5)), ("0..2, 7", (0, 1, 2, 7))],
)
def test_seeds_are_ranges_and_lists(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "-1", "3..1", "0,0", "0..2,1", "1.5", "0...3"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="seeds: "):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0,2,8", ["0", "2", "8"]),
        ("[0,1]", ["[0,1]"]),
        ("[0,1],[2,3]", ["[0,1]", "[2,3]"]),
        ("{a: 1, b: [2, 3]},{a: 2}", ["{a: 1, b: [2, 3]}", "{a: 2}"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("it's,so", ["it's", "so"]),
        ("", [""]),
    ],
)
def test_values_are_split_at_commas_outside_of_brackets(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_the_grid_is_a_product_and_ties_follow_it() -> None:
    definition = with_arguments(
        Definition("starpo_s"),
        ["actors.weight_lag=0,2", "correction.kind=none,decoupled", "eval.every=10"],
    )
    definition = Definition(
        recipe="starpo_s",
        grid=definition.grid,
        overrides=definition.overrides,
        tie={"buffer.max_staleness": "actors.weight_lag"},
    )
    cells = cells_of(definition)
    assert [cell.name for cell in cells] == [
        "weight_lag-0_kind-none",
        "weight_lag-0_kind-decoupled",
        "weight_lag-2_kind-none",
        "weight_lag-2_kind-decoupled",
    ]
    assert cells[3].swept == {"actors.weight_lag": "2", "correction.kind": "decoupled"}
    configs = configs_of(definition, ROOT / "configs" / "starpo_s.yaml", cells)
    for cell in cells:
        config = configs[cell.name]
        assert config.buffer.max_staleness == config.actors.weight_lag
        assert config.actors.weight_lag == int(cell.swept["actors.weight_lag"])
        assert config.correction.kind == cell.swept["correction.kind"]
        assert config.eval.every == 10
        assert config.buffer.archive == "all", "a study keeps its data"


def test_a_key_can_follow_the_seed_of_its_run(tmp_path: Path) -> None:
    tied = Definition("workshop", seeds=(7, 8), tie={"env.params.secret": "run.seed"})
    cells = cells_of(tied)
    configs = configs_of(tied, ROOT / "configs" / "workshop.yaml", cells)
    study = Study(tmp_path, tied, cells, configs)
    for run in runs_of(study):
        assert f"env.params.secret={run.seed}" in command_of(study, run)
    cold = command_of(study, cold_run(study, 8))
    assert "env.params.secret=8" in cold and "run.seed=8" in cold


def test_a_definition_without_axes_is_one_cell() -> None:
    (cell,) = cells_of(Definition("bandit"))
    assert (cell.name, cell.changes) == ("base", ())


def test_variants_are_the_first_axis() -> None:
    definition = Definition(
        "bandit",
        variants={"sync": {"buffer.max_staleness": "0"}, "async": {}},
        grid={"learner.lr": ("1e-3", "1e-4")},
    )
    names = [cell.name for cell in cells_of(definition)]
    assert names == ["sync_lr-1e-3", "sync_lr-1e-4", "async_lr-1e-3", "async_lr-1e-4"]


def test_a_part_of_what_a_variant_sets_as_a_whole_is_set_in_all_cells() -> None:
    definition = Definition(
        "bandit",
        variants={
            "long": {"stages": "[{kind: rl, steps: 9}]", "eval": "{every: 7}"},
            "short": {"stages": "[{kind: rl, steps: 3}]"},
        },
        grid={"stages.0.reset_optimizer": ("true", "false")},
        overrides={"stages.0.override.learner.lr": "0.5", "stages+": "{steps: 1}"},
    )
    definition = with_arguments(definition, ["eval.every=5"])
    configs = configs_of(definition, ROOT / "configs" / "bandit.yaml", cells_of(definition))
    assert [config.stages[0].steps for config in configs.values()] == [9, 9, 3, 3]
    for config in configs.values():
        assert config.stages[0].override == {"learner": {"lr": 0.5}}
        assert [stage.steps for stage in config.stages[1:]] == [1]
        assert config.eval.every == 5


def test_mappings_are_merged_into_one(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    a, b = "a: &a {buffer.reuse: 1}", "b: &b {learner.lr: 1e-3}"
    path.write_text(f"recipe: r\nvariants: {{{a}, {b}, both: {{<<: *a, <<: *b}}}}\n")
    definition = definitions.read(path)
    assert definition is not None
    assert definition.variants["both"] == {"buffer.reuse": "1", "learner.lr": "1e-3"}


def test_a_study_goes_on_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    definition = Definition("bandit", overrides={"policy.path": "model"})
    recipe = ROOT / "configs" / "bandit.yaml"
    (config,) = configs_of(definition, recipe, cells_of(definition)).values()
    assert config.policy.path == str(tmp_path / "model")


def test_names_are_plain_directory_names_and_differ() -> None:
    values = ("[a, b]", "a/b", "a b")
    names = [cell.name for cell in cells_of(Definition("r", grid={"tasks.path": values}))]
    assert len(set(names)) == 3
    assert not any(set(name) & set("/ []=") for name in names)
    long = Definition("r", grid={"tasks.path": ("a" * 300, "b" * 300)})
    assert all(len(cell.name) < 120 for cell in cells_of(long))


def test_keys_are_shortened_as_far_as_they_differ() -> None:
    keys = ["advantage.kind", "correction.kind", "learner.lr", "variant"]
    assert list(short_names(keys).values()) == [
        "advantage.kind",
        "correction.kind",
        "lr",
        "variant",
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tie": {"a.b": "c.d"}}, "tie a.b=c.d: c.d is not swept"),
        ({"grid": {"a.b": ("1", "2")}, "overrides": {"a.b": "3"}}, "a.b: is set by the grid and"),
        ({"grid": {"a.b": ("1", "2")}, "tie": {"a.b": "a.b"}}, "a.b: is set by the grid and"),
        ({"grid": {"a.b": ("1", "1")}}, "a.b: a value is repeated: 1, 1"),
        ({"grid": {"variant": ("x", "z")}, "variants": {"x": {}, "y": {}}}, "variant: is no key"),
    ],
)
def test_settings_with_two_sources_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Definition("r", **values)


def test_arguments_replace_what_the_yaml_says() -> None:
    written = Definition("r", grid={"a.b": ("1", "2")}, overrides={"c.d": "3", "e.f": "4"})
    changed = with_arguments(written, ["a.b=5", "c.d=6,7"])
    assert changed.grid == {"c.d": ("6", "7")}
    assert changed.overrides == {"e.f": "4", "a.b": "5"}


def test_a_second_added_stage_is_refused() -> None:
    stages = ["stages+={kind: rl, steps: 5}", "stages+={kind: rl, steps: 6}"]
    assert with_arguments(Definition("r"), stages[:1]).overrides == {"stages+": stages[0][8:]}
    with pytest.raises(ConfigError, match=r"stages\+: a study adds one stage"):
        with_arguments(Definition("r"), stages)


@pytest.mark.parametrize("text", ["a.b", "=1", "a.b=1,,2"])
def test_arguments_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        with_arguments(Definition("r"), [text])


def test_a_definition_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    definition = Definition(
        "recipe.yaml",
        seeds=(1, 4),
        grid={"a.b": ("none", "0", "[1, 2]", "true")},
        variants={"x": {"c.d": "1e-3"}, "y": {}},
        tie={"e.f": "a.b"},
        overrides={"g.h": ""},
        threshold=Threshold("train/success", 0.25),
        equivalence=0.05,
        cold_start=True,
    )
    path = tmp_path / "definition.yaml"
    path.write_text(definitions.dump(definition))
    assert definitions.read(path) == definition


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grids: {a.b: [1]}", "grids: unknown key, did you mean grid?"),
        ("seeds: 3..1", "seeds: 3..1 ends before it begins"),
        ("seeds: [0, x]", "seeds: '0,x' cannot be read"),
        ("grid: [1]", "grid: must be a mapping, is"),
        ("grid: {a.b: []}", "grid: must not be an empty list"),
        ("threshold: 0.8", "threshold: must be metric=number"),
        ("equivalence: -1", "equivalence: must be a number of at least 0"),
        ("cold_start: 3", "cold_start: must be true or false"),
        ("overrides: {a.b: 1}\noverrides: {c.d: 2}", "overrides: is given twice in one mapping"),
        ("variants: {x: {a.b: [{c: 1, c: 2}]}}", "c: is given twice in one mapping"),
    ],
)
def test_a_wrong_study_names_its_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(f"recipe: r\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        definitions.read(path)
    assert str(refused.value).startswith(str(path))
    assert message in str(refused.value)


def test_a_recipe_is_no_study(tmp_path: Path) -> None:
    assert definitions.read(ROOT / "configs" / "bandit.yaml") is None


@pytest.mark.parametrize("text", ["0.8", "eval/success=", "eval/success=high", "=0.8", "a=nan"])
def test_other_thresholds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="threshold: "):
        parse_threshold(text)


@pytest.mark.parametrize(
    "metric", [*EVAL_METRICS, "eval/own/avg@8", "eval/own/reward_best@2", "eval/own/distinct"]
)
def test_every_metric_of_evaluations_can_be_a_threshold(metric: str) -> None:
    assert parse_threshold(f"{metric}=0.5") == Threshold(metric, 0.5)
    with pytest.raises(ConfigError, match=f"no metric {metric}s"):
        parse_threshold(f"{metric}s=0.5")


def test_the_metrics_of_evaluations_are_those_of_the_documentation() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert f"| {', '.join(f'`{name}`' for name in EVAL_METRICS)} |" in text


@pytest.mark.parametrize(
    "value", ["none", "a: b", "", [0.9, 0.99], True, 1e-05, {"a": ["b", None]}]
)
def test_values_are_written_in_one_line_of_yaml(value: object) -> None:
    from omegaconf import OmegaConf

    text = flow(value)
    assert "\n" not in text
    assert OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"])) == {"value": value}


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.stem)
def test_every_shipped_study_can_be_run(study: Path) -> None:
    definition = definitions.read(study)
    assert definition is not None
    cells = cells_of(definition)
    assert len(cells) >= 2
    configs = configs_of(definition, study.parent / definition.recipe, cells)
    assert not definition.cold_start or cold_stages(configs) >= 1
    assert study.read_text().startswith("# ") and len(study.read_text().splitlines()) <= 40


def test_the_promised_studies_are_shipped() -> None:
    names = {"lag", "staleness", "correction", "reuse", "evidence", "sync_vs_async"}
    assert {path.stem for path in STUDIES} >= names
