"""Games of the real package, made offline and played by their own solution."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from actors.adapters.textworld_env import PREFIX, _compiled
from actors.envs.base import EnvError, isolation_of, make_env
from evolver_async.schema import Task

pytest.importorskip("textworld")


def task(number: int = 0, split: str = "train") -> Task:
    return Task(task_id=f"t/{split}/{number}", env="textworld", split=split, map_seed=number)


def test_a_game_is_won_by_its_solution_and_what_is_impossible_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env: Any = make_env("textworld", {"quest_length": 2})
    opening = env.reset(task(), 0)
    assert all(command in opening for command in env.actions())
    wrong = env.step("eat the moon")
    assert not wrong.info.valid and wrong.reward == 0.0
    steps = [env.step(env.solve()[0]) for _ in range(2)]
    assert steps[-1].terminated and steps[-1].info.success
    assert sum(step.reward for step in steps) == 1.0
    assert env.reset(task(), 1) == opening, "a group shares its game"
    env.close()
    assert not list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    assert isolation_of("textworld", type(env)) == "process"


def test_files_are_played_and_what_cannot_be_is_named(tmp_path: Path) -> None:
    for end, content in _compiled(5, 1, 2, 1).items():
        (tmp_path / f"own{end}").write_bytes(content)
    env: Any = make_env("textworld", {"games": [str(tmp_path / "own.z8")]})
    played = [split for split in ("train", "validation", "test") if _plays(env, split)]
    assert len(played) == 1, "a file belongs to one split"
    for params in ({"games": [str(tmp_path / "none.z8")]}, {"rooms": 0}):
        with pytest.raises(EnvError, match=rf"^env\.params\.{next(iter(params))}"):
            make_env("textworld", params)


def _plays(env: Any, split: str) -> bool:
    try:
        return bool(env.reset(task(split=split), 0))
    except ValueError:
        return False
