"""The README's example environment, and the list of recipes, are true."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from actors.checks.config import check as check_rollouts
from actors.envs.base import make_env
from evolver_async.config.load import load, stage_config
from evolver_async.schema import Task

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_environment_of_the_readme_can_be_named_and_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = re.search(r"```python\n# my_package/my_env.py\n(.*?)```", README, re.DOTALL)
    assert code
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_env.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)

    (command,) = re.findall(r"evolver-async train (.*my_package\.my_env:.*)", README)
    recipe, *dotlist = shlex.split(command)
    config = load(ROOT / recipe, dotlist)
    check_rollouts(config)
    assert stage_config(config, 0).env.params == {}

    env = make_env(config.env.name, config.env.params)
    task = Task(task_id="t", env=config.env.name, split="train", map_seed=0)
    answer = env.reset(task, 0)
    assert not env.step("neither").info.success
    step = env.step(answer)
    assert step.terminated and step.info.success and step.reward == 1.0


def test_make_recipes_trains_what_the_documents_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    recipes = importlib.import_module("recipes")
    page = (ROOT / "docs" / "recipes.md").read_text()
    listed = {name for row in re.findall(r"^\| (`.*?) \|", page, re.M) for name in names(row)}
    marked = {mark.recipe for mark in recipes.MARKS}
    others = {name for name in listed if name.startswith("agentevolver")}
    # with figures of their own
    others |= {"frozen_lake", "workshop", "internalisation", "own", "arithmetic"}
    others |= {"self_play"}  # whose success is no measure of play
    others |= {"distill"}  # whose teacher another run makes
    assert {"starpo_s", "agentevolver", "dpo"} <= listed
    assert listed - others == marked
    for mark in recipes.MARKS:
        assert mark.seeds == (5 if mark.recipe.startswith("bandit") else 3)


def names(row: str) -> list[str]:
    return re.findall(r"`(\w+)\.yaml`", row)


def test_nothing_in_the_documents_is_left_open() -> None:
    for page in (README, *(path.read_text() for path in ROOT.glob("docs/*.md"))):
        assert "@@" not in page
