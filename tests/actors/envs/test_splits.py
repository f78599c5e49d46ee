"""Splits of the built-in environments: what is held out is not trained, not even in part."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.envs.base import Env, Identified, make_env
from evolver_async.buffer.stages import eval_sets_of, source_of
from evolver_async.config.load import load, stage_config
from evolver_async.schema import Task
from evolver_async.splits import SPLITS, Split, checked_split, split_of

CONFIGS = Path(__file__).parents[3] / "configs"
HELD_OUT: tuple[Split, Split] = ("validation", "test")
FEWEST = 60  # different held-out tasks of a recipe
SAME_IN_ALL = ("bandit",)  # two tasks, which every split has


def kinds() -> list[tuple[str, str]]:
    """Environments of all recipes with their parameters as JSON, those of further sets too."""
    found = set()
    for path in [*CONFIGS.glob("*.yaml"), *CONFIGS.glob("gpu/*.yaml")]:
        config = load(path)
        for index in range(len(config.stages)):
            staged = stage_config(config, index)
            sources = [source_of(staged), *(one.source for one in eval_sets_of(staged).values())]
            for task in (task for source in sources for task in source.examples()):
                params = msgspec.json.encode(task.params, order="sorted").decode()
                # Rows have a test of their own, and a service's splits are the service's. A game
                # that is played against oneself begins alike in all splits.
                elsewhere = ("prompts", "agentevolver", "textarena")
                if not task.env.startswith(elsewhere):
                    found.add((task.env, params))
    return sorted(found)


def begun(env: Env, name: str, split: str, number: int) -> str:
    """Begin a task; return its first observation."""
    task = Task(task_id=f"{name}/{split}/{number}", env=name, split=split, map_seed=number)
    return env.reset(task, 0)


def ground(env: Any, name: str, observation: str) -> str:
    """What can be learned by heart of the task that was begun, told from the board itself."""
    if name == "sokoban":
        return f"{env.board.cells} {env.now[1]}"
    if name in ("frozen_lake", "cliff_walking"):
        return env.board.cells.replace("G", "_")
    return str(env.wanted) if name.startswith("webshop") else observation


@cache
def drawn(name: str, params: str, split: str, numbers: int) -> tuple[set[str], set[str]]:
    """Grounds, and tasks, of the first numbers of a split."""
    env = make_env(name, msgspec.json.decode(params))
    grounds, tasks = set[str](), set[str]()
    for number in range(numbers):
        observation = begun(env, name, split, number)
        grounds.add(ground(env, name, observation))
        tasks.add(env.content() if isinstance(env, Identified) else observation)
    return grounds, tasks


def test_nothing_that_a_recipe_holds_out_is_in_its_training() -> None:
    found = kinds()
    assert len({name for name, _ in found}) > 4
    for name, params in found:
        check_held_out(name, params)


def check_held_out(name: str, params: str) -> None:
    trained, all_trained = drawn(name, params, "train", 400)
    for split in HELD_OUT:
        grounds, tasks = drawn(name, params, split, 512)
        if name in SAME_IN_ALL:
            assert tasks == all_trained and len(tasks) == 2
        else:
            assert not grounds & trained, (name, params, split)
            assert len(tasks) >= FEWEST, (name, params, split)
    if name not in SAME_IN_ALL:
        validation, test = (drawn(name, params, split, 512)[0] for split in HELD_OUT)
        assert not validation & test, (name, params)


def test_contents_are_spread_over_the_splits_by_their_shares() -> None:
    found = [split_of(f"content {number}") for number in range(4000)]
    for split, share in (("train", 6 / 8), ("validation", 1 / 8), ("test", 1 / 8)):
        spread = 5 * math.sqrt(share * (1 - share) / 4000)
        assert found.count(split) / 4000 == pytest.approx(share, abs=spread)


def test_an_unknown_split_is_refused_by_its_name() -> None:
    assert [checked_split(split) for split in SPLITS] == [*SPLITS]
    for name in ("frozen_lake", "sokoban", "cliff_walking", "code", "webshop"):
        with pytest.raises(ValueError, match="split: 'dev' is none of train, validation, test"):
            begun(make_env(name, {}), name, "dev", 0)


@pytest.mark.parametrize(
    ("name", "params"),
    [("frozen_lake", {"grid": "never"}), ("sokoban", {"view": "coordinates", "hints": False})],
)
def test_a_content_tells_tasks_apart_that_look_alike(name: str, params: dict[str, Any]) -> None:
    env = make_env(name, params)
    assert isinstance(env, Identified)
    seen = [(begun(env, name, "train", number), env.content()) for number in range(600)]
    again = [(begun(env, name, "train", number), env.content()) for number in range(600)]
    assert seen == again
    assert len({content for _, content in seen}) > len({text for text, _ in seen})
