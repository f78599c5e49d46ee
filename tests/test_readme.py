"""What the README shows works as it is shown."""

import re
from pathlib import Path

from actors.envs.base import Solvable, make_env
from evolver_async.schema import Task

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_environment_of_the_readme_can_be_named_and_played(tmp_path, monkeypatch):
    code = re.search(r"```python\n# my_package/my_env.py\n(.*?)```", README, re.DOTALL)
    assert code
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_env.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)

    env = make_env("my_package.my_env:Guess", {"limit": 20})
    task = Task(task_id="t", env="my_package.my_env:Guess", split="train", map_seed=0)
    assert env.reset(task, 0) == "a number from 0 to 20"
    assert isinstance(env, Solvable)
    (answer,) = env.solve()
    wrong = str((int(answer) + 1) % 21)
    assert env.step(wrong).observation in ("low", "high")
    assert not env.step("seven").info.valid
    step = env.step(answer)
    assert step.terminated and step.info.success and step.reward == 1.0


def test_nothing_in_the_readme_is_left_open():
    assert "@@" not in README
