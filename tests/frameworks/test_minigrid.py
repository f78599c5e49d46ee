"""Grids of the real package, shown as text."""

from typing import Any

import pytest

from actors.envs.base import make_env
from evolver_async.schema import Task

pytest.importorskip("minigrid")


def task(number: int = 0, split: str = "train") -> Task:
    return Task(task_id=f"g/{split}/{number}", env="gymnasium", split=split, map_seed=number)


def grid(id: str, **params: Any) -> Any:
    return make_env("gymnasium", {"id": f"minigrid:{id}"} | params)


def test_an_empty_room_is_crossed_by_what_its_text_says() -> None:
    env = grid("MiniGrid-Empty-5x5-v0", held_out="seed")
    seen = env.reset(task(), 0)
    assert seen.splitlines() == [
        "mission: get to the green goal square",
        "you face right",
        "you carry nothing",
        "wall 1 left",
        "wall 3 ahead",
        "wall 3 right",
        "green goal 2 ahead, 2 right",
    ]
    steps = [env.step(action) for action in ("forward", "forward", "right", "forward", "forward")]
    assert "green goal 2 ahead\n" in steps[2].observation
    assert steps[-1].terminated and steps[-1].info.success and steps[-1].reward > 0
    assert not env.step("jump").info.valid


def test_a_key_is_carried_to_the_door_that_it_opens() -> None:
    env = grid("MiniGrid-DoorKey-5x5-v0", held_out="seed")
    for number in range(20):
        seen = env.reset(task(number), 0)
        if "yellow key 1 ahead" in seen.splitlines():
            break
    assert env.step("pickup").observation.splitlines()[2] == "you carry yellow key"
    doors = [env.step("right").observation for _ in range(4)]
    (door, *_) = [text for text in doors if "yellow door" in text]
    assert "locked yellow door" in door


def test_starts_are_split_by_what_they_show() -> None:
    env = grid("BabyAI-GoToObj-v0")
    assert env.names == ["left", "right", "forward", "pickup", "drop", "toggle", "done"]
    train, test = ({env.reset(task(n, split), 0) for n in range(20)} for split in ("train", "test"))
    assert len(train) > 5 and not train & test
    assert env.reset(task(3), 1) == env.reset(task(3), 2), "a group shares its start"
