"""What the README shows works as it is shown."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from actors.checks.config import check as check_rollouts
from actors.envs.base import Solvable, make_env
from evolver_async.config.load import load, stage_config
from evolver_async.schema import Task

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TRAIN = re.findall(r"evolver-async train (configs/[^`\n]*)", README.replace("\\\n", ""))


@pytest.mark.parametrize("command", TRAIN)
def test_every_train_command_of_the_readme_loads(command):
    recipe, *dotlist = shlex.split(command)
    load(ROOT / recipe, dotlist)


def test_the_commands_are_found_whole():
    shown = [line for line in README.splitlines() if "evolver-async train configs/" in line]
    assert len(TRAIN) == len(shown) >= 6
    assert any("/models/my-model" in command and "stages=" in command for command in TRAIN)


def test_the_environment_of_the_readme_can_be_named_and_played(tmp_path, monkeypatch):
    code = re.search(r"```python\n# my_package/my_env.py\n(.*?)```", README, re.DOTALL)
    assert code
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_env.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)

    (command,) = (command for command in TRAIN if "my_package" in command)
    recipe, *dotlist = shlex.split(command)
    config = load(ROOT / recipe, dotlist)
    check_rollouts(config)
    for index in range(len(config.stages)):
        assert stage_config(config, index).env.params == {"limit": 20}

    env = make_env(config.env.name, config.env.params)
    task = Task(task_id="t", env="my_package.my_env:Guess", split="train", map_seed=0)
    assert env.reset(task, 0) == "a number from 0 to 20"
    assert isinstance(env, Solvable)
    (answer,) = env.solve()
    wrong = str((int(answer) + 1) % 21)
    assert env.step(wrong).observation in ("low", "high")
    assert not env.step("seven").info.valid
    step = env.step(answer)
    assert step.terminated and step.info.success and step.reward == 1.0


def test_make_recipes_trains_what_the_readme_says(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    recipes = importlib.import_module("recipes")
    section = README.partition("\n## Recipes\n")[2].partition("\n## ")[0]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", section, re.M) for name in names(row)}
    others = {name for name in listed if name.startswith("agentevolver")} | {"frozen_lake"}
    assert {"starpo_s", "agentevolver", "dpo"} <= listed
    assert listed - others <= {mark.recipe for mark in recipes.MARKS}
    assert not others & {mark.recipe for mark in recipes.MARKS}
    for mark in recipes.MARKS:
        assert mark.seeds == (5 if mark.recipe.startswith("bandit") else 3)


def names(row: str) -> list[str]:
    return re.findall(r"`(\w+)\.yaml`", row)


def test_nothing_in_the_readme_is_left_open():
    assert "@@" not in README
