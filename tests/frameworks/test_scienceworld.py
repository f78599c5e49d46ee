"""Experiments of the real simulator, carried out by its own solution."""

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from actors.adapters.scienceworld_env import _simulator
from actors.envs.base import EnvError, isolation_of, make_env
from evolver_async.schema import Task

pytest.importorskip("scienceworld")
pytestmark = pytest.mark.process
LIVING = {"tasks": ["find-living-thing"]}


@pytest.fixture(scope="module", autouse=True)
def one_simulator() -> Iterator[None]:
    yield
    java = _simulator()._gateway.java_process
    _simulator().close()
    java.wait()
    _simulator.cache_clear()


def task(number: int = 0, split: str = "train") -> Task:
    return Task(task_id=f"s/{split}/{number}", env="scienceworld", split=split, map_seed=number)


def test_an_experiment_succeeds_by_its_solution_and_unknown_actions_are_told() -> None:
    env: Any = make_env("scienceworld", LIVING)
    opening = env.reset(task(), 0)
    assert "find a(n) living thing" in opening and "This room is called" in opening
    assert "look around" in env.actions()
    solution = env.solve()
    wrong = env.step("eat the moon with a spoon")
    assert not wrong.info.valid and wrong.reward == 0.0 and not wrong.terminated
    steps = [env.step(action) for action in solution]
    assert steps[-1].terminated and steps[-1].info.success
    assert all(step.info.valid for step in steps) and not steps[-2].terminated
    assert 0.5 < sum(step.reward for step in steps) <= 1.0
    assert env.solve() == [], "none from the middle of an episode"
    assert env.reset(task(), 1) == opening, "a group shares its variation"
    assert isolation_of("scienceworld", type(env)) == "process"


def test_splits_are_the_simulators_own_and_one_simulator_plays_all_episodes() -> None:
    first = _simulator()._gateway.java_process.pid
    for split, count in {"train": 150, "validation": 75, "test": 75}.items():
        env: Any = make_env("scienceworld", LIVING)
        played = set()
        for number in range(4):
            env.reset(task(number, split), 0)
            played.add(env.content())
        own = {"train": range(150), "validation": range(150, 225), "test": range(225, 300)}[split]
        assert {int(content.split()[1]) for content in played} <= set(own)
        assert len(played) > 1 and len(own) == count
        env.close()
    children = [one for one in psutil.Process().children() if "java" in one.name()]
    assert [child.pid for child in children] == [first]


@pytest.mark.parametrize("params", [{"tasks": ["fly"]}, {"simplifications": "harder"}])
def test_a_parameter_that_cannot_be_is_named(params: dict[str, Any]) -> None:
    (key,) = params
    env: Any = make_env("scienceworld", LIVING | params)
    with pytest.raises((ValueError, EnvError), match=rf"^{key}: "):
        env.reset(task(), 0)
