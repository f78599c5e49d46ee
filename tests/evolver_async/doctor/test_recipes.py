"""Every recipe fits the hardware that it names, with its real model, by the checks of `doctor`."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from machines import GB, machine

from evolver_async.config import Config
from evolver_async.config.load import load
from evolver_async.config.shape import DecoderShape, shape_of
from evolver_async.doctor import hours
from evolver_async.doctor.probes.recipe import model
from evolver_async.doctor.probes.result import ProbeResult
from evolver_async.doctor.recipe_check import gpus_of, requirements
from evolver_async.durations import duration

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "tests" / "data" / "models"
CONFIGS = ROOT / "configs"
OWN = {CONFIGS / "arithmetic.yaml", CONFIGS / "own.yaml"}  # need the reader's own model or rows
RECIPES = sorted({*CONFIGS.rglob("*.yaml")} - {*CONFIGS.glob("studies/*")} - OWN)
HOST_BYTES = 2000 * GB  # of a node with eight GPUs
SMALL_HOST_BYTES = 16 * GB
TUNED = "-sft"  # what a cold start makes of a public model has its shape


@cache
def loaded(recipe: Path) -> Config:
    return load(recipe)


GPU_RECIPES = [path for path in RECIPES if loaded(path).run.hardware]


@cache
def shape(path: str, *dotlist: str) -> ProbeResult:
    return model(path, *dotlist)


def real_model(recipe: Path, config: Config) -> ProbeResult:
    """What `doctor` finds where the recipe's model has been put."""
    if not config.policy.path:
        return shape(str(recipe))
    name = Path(config.policy.path).name.removesuffix(TUNED)
    return shape(str(ROOT / "configs" / "gpu_single.yaml"), f"policy.path={MODELS / name}")


def machine_of(config: Config) -> dict[str, ProbeResult]:
    """As bare as `run.hardware` says: without GPUs it is a small one."""
    if not config.run.hardware:
        return machine(host_bytes=SMALL_HOST_BYTES)
    count, size = gpus_of(config.run.hardware)
    return machine(*[{"bytes": size, "capability": [9, 0]}] * count, host_bytes=HOST_BYTES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_run_on_the_hardware_that_it_names(recipe: Path) -> None:
    config = loaded(recipe)
    found = machine_of(config) | {"model": real_model(recipe, config)}
    said = requirements(config, found)
    assert [(one.key, one.why) for one in said if not one.met] == []


def test_a_recipe_that_asks_for_gpus_names_its_hardware() -> None:
    asks = [path for path in RECIPES if "cuda" in devices(loaded(path))]
    assert asks == [path for path in RECIPES if loaded(path).run.hardware] and len(asks) >= 10


def devices(config: Config) -> tuple[str, str]:
    return config.engine.device, config.learner.device


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_gpu_recipe_says_its_hardware_in_its_head_and_uses_all_of_it(recipe: Path) -> None:
    config = loaded(recipe)
    if not config.run.hardware:
        return
    head = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    assert any("Hardware: " in line for line in head)
    gpus = config.launch.gpus
    assert {*gpus.actors, *gpus.learner} == {*range(gpus_of(config.run.hardware)[0])}


def counted(recipe: Path) -> tuple[Config, DecoderShape, hours.Card]:
    """A GPU recipe, the shape of its real model, and the fastest card of the memory it names."""
    config = loaded(recipe)
    path = str(MODELS / Path(config.policy.path).name.removesuffix(TUNED))
    shape = shape_of(replace(config, policy=replace(config.policy, path=path)))
    assert shape is not None
    return config, shape, hours.cards_of(config, [])[0]


@pytest.mark.parametrize("recipe", GPU_RECIPES, ids=lambda path: path.stem)
def test_a_head_says_what_doctor_counts_and_no_other_division_would_be_much_faster(
    recipe: Path,
) -> None:
    """Where a count has changed, put what the assertion shows into the recipe's head."""
    config, shape, card = counted(recipe)
    count, *others = hours.texts(config, shape, [card])
    assert f"# {count}" in recipe.read_text().splitlines()
    assert len(others) == 1, others


def test_the_table_of_hours_has_what_is_counted() -> None:
    """Where a count has changed, put the lines that the assertion shows into the table."""
    page = (ROOT / "docs" / "scaling.md").read_text().splitlines()
    rows = [table_row(recipe) for recipe in GPU_RECIPES if recipe.stem not in SAME]
    assert [row for row in rows if row not in page] == []


SAME = {"gpu_cluster", "agentevolver_appworld"}  # have the numbers of the recipe below them


def table_row(recipe: Path) -> str:
    config, shape, card = counted(recipe)
    cells = []
    for gpus in (1, 8, 64):
        found = hours.divided(config, shape, card, gpus)
        count = found and hours.run_count(found, shape, card)
        fits = f"{duration(count.run_s)}: {hours.division_text(found)}" if found and count else "–"
        cells.append(fits)
    return f"| `{recipe.relative_to(CONFIGS)}` | {card.name} | {' | '.join(cells)} |"


@pytest.mark.parametrize(
    ("dotlist", "key"),
    [
        (["engine.kind=torch", "engine.tensor_parallel=1", "actors.count=2"], "engine.slots"),
        (["learner.ranks=4", "launch.gpus.learner=[2, 3, 4, 5]"], "learner.ranks"),
        (["learner.gradient_checkpointing=false"], "learner.ranks"),
        (["policy.max_length=140000", "learner.token_budget=140000"], "policy.max_length"),
    ],
)
def test_what_does_not_fit_there_is_named(dotlist: list[str], key: str) -> None:
    recipe = ROOT / "configs" / "gpu" / "dapo.yaml"
    config = load(recipe, dotlist)
    found: dict[str, Any] = machine_of(config) | {"model": real_model(recipe, config)}
    assert key in [one.key for one in requirements(config, found) if one.met is False]
