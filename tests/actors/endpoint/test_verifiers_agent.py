"""Environments of the real verifiers, tools and all, against the endpoint."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_agents import Client, Scripted, run

from actors.checks.config import check
from actors.endpoint.verifiers_agent import play
from actors.envs.base import EnvError, Probed, make_env
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.schema import Task

pytest.importorskip("verifiers.v1")
pytestmark = pytest.mark.process

TASKSET = '''
import verifiers.v1 as vf


class Places(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def look(self, where: str) -> str:
        """Look somewhere."""
        return f"nothing {where}"


class Data(vf.TaskData):
    answer: str


class Search(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Places(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def found(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)


class Searches(vf.Taskset[Search, vf.TasksetConfig]):
    def load(self):
        for i in range(40):
            yield Search(Data(prompt=f"find it, {i}", answer="gold"), self.config.task)


__all__ = ["Searches"]

if __name__ == "__main__":
    Places.run()
'''


@pytest.fixture
def searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "searches.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    yield "searches"
    sys.modules.pop("searches", None)


def task(**params: Any) -> Task:
    return Task(task_id="v", env="verifiers", split="train", map_seed=3, params=params)


def test_tools_of_a_taskset_are_called_and_every_turn_is_recorded(searches: str) -> None:
    call = json.dumps({"name": "places_look", "arguments": {"where": "left"}})
    engine = Scripted(f"<tool_call>\n{call}\n</tool_call>", "gold")
    asked = task(taskset=searches, play={})

    async def player(client: Client) -> Any:
        url = str(client.base_url).rstrip("/")
        return await play(base_url=url, api_key=client.api_key, task=asked, seed=0)

    limits = {"max_turns": 9, "max_length": 1 << 14, "episode_timeout_s": 300.0}
    trajectory = run(player, engine, max_tokens=1000, **limits).one
    assert trajectory.reward == 1.0 and trajectory.success
    (sequence,) = trajectory.sequences
    first, second = (request.tokens for request in engine.requests)
    assert second == sequence.tokens[: len(second)].tolist()
    told = engine.chat.decoded(second[len(first) :])
    assert "nothing left" in told and "find it" in engine.chat.decoded(first)


def test_what_needs_tools_names_the_agent_that_plays_it(searches: str) -> None:
    env = make_env("verifiers", {"taskset": searches})
    assert isinstance(env, Probed)
    with pytest.raises(
        ValueError, match=r"^env\.params\.taskset: .*needs tools.*env\.params\.play"
    ):
        env.probe()
    played = make_env("verifiers", {"taskset": searches, "play": {}})
    assert isinstance(played, Probed)
    played.probe()
    given = [f"env.params={{taskset: {searches}, play: {{}}}}", "stages=[{kind: rl, steps: 1}]"]
    chosen = [*given, "env.name=verifiers"]
    with pytest.raises(ConfigError, match=r"^rollout\.agent: must be actors\.endpoint\.verifiers"):
        check(load(None, chosen))
    check(load(None, [*chosen, "rollout.agent=actors.endpoint.verifiers_agent:play"]))


@pytest.mark.parametrize("wrong", [{"no_such_key": 1}, {"agent": {"harness": {"id": "nothing"}}}])
def test_a_configuration_that_cannot_be_is_named(searches: str, wrong: dict[str, Any]) -> None:
    asked = task(taskset=searches, play=wrong)
    with pytest.raises(EnvError, match=r"^env\.params\.play: "):
        asyncio.run(play(base_url="http://x", api_key="x", task=asked, seed=0))
