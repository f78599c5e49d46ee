"""Tools of real MCP servers beside those of an environment (`env.tools.mcp`)."""

import asyncio
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from abacus_runs import styled
from families import family_tokenizer
from launches import is_step, wait_for
from rollouts import TOKENIZER, FakeEngine, corridor, roll_out, say, setting

from actors.checks.config import check_servers
from actors.envs.base import EnvironmentFailure
from actors.envs.tool_server import ToolServer
from actors.formats.chat import Chat
from actors.formats.tool_calls import canonical
from actors.formats.turns import turn_format
from actors.rollout.episode_config import Setting
from evolver_async.cli import main
from evolver_async.config import ConfigError
from evolver_async.config.load import load
from evolver_async.files import parsed
from evolver_async.schema import Sampling, Ticket, TurnFlag

fastmcp = pytest.importorskip("fastmcp")
pytestmark = pytest.mark.process

SERVER = '''
"""Tools of a place: each process of it leaves a file with its number."""
import os
import sys
from pathlib import Path

import fastmcp

server = fastmcp.FastMCP("places")
Path(sys.argv[1], str(os.getpid())).touch()

@server.tool
def look(where: str) -> str:
    """Look somewhere."""
    return f"nothing {where}, says {os.getpid()}"

@server.tool
def leave() -> str:
    os._exit(3)

if __name__ == "__main__":
    server.run(show_banner=False)
'''
LOOK = '<tool_call>{"name": "look", "arguments": {"where": "left"}}</tool_call>'
LEAVE = '<tool_call>{"name": "leave"}</tool_call>'
WRONG = '<tool_call>{"name": "look", "arguments": {"there": 3}}</tool_call>'
GO = "<answer>right</answer>"


@pytest.fixture
def command(tmp_path: Path) -> str:
    (tmp_path / "places.py").write_text(SERVER)
    (tmp_path / "started").mkdir()
    return f"{sys.executable} {tmp_path / 'places.py'} {tmp_path / 'started'}"


def started(tmp_path: Path) -> list[int]:
    return [int(path.name) for path in (tmp_path / "started").iterdir()]


def asked(members: int = 1, **params: Any) -> Ticket:
    sampling = Sampling(temperature=1.0, max_tokens=100)
    return msgspec.structs.replace(corridor(members, **params), sampling=sampling)


def served(server: ToolServer, isolation: str = "loop") -> Setting:
    return styled("tool_call", server=server, isolation=isolation, step_timeout_s=60.0)


def played(setting: Setting, ticket: Ticket, engine: FakeEngine, runner: asyncio.Runner) -> Any:
    return roll_out(ticket, setting, engine, run=runner.run)


@pytest.mark.parametrize("isolation", ["loop", "thread", "process"])
def test_one_server_serves_all_episodes_of_a_process(
    isolation: str, command: str, tmp_path: Path
) -> None:
    server = ToolServer(command)
    setting = served(server, isolation)
    with asyncio.Runner() as runner:
        for group in range(2):
            ticket = msgspec.structs.replace(asked(2, length=2), group_id=group)
            engine = FakeEngine({f"{group}/{member}/0": say(LOOK, GO, GO) for member in range(2)})
            for one in played(setting, ticket, engine, runner):
                assert one.success and one.reward == 1.0
                assert one.turn_flags.tolist() == [TurnFlag.TOOL_CALL, 0, 0]
            (pid,) = started(tmp_path)
            seen = [TOKENIZER.decode(request.tokens) for request in engine.requests]
            listed = [re.findall(r'"name": "(\w+)", "desc', text) for text in seen]
            assert listed == [["look", "leave"]] * len(seen)
            assert sum(f"nothing left, says {pid}" in text for text in seen) == 4
        runner.run(server.close())
        assert not psutil.pid_exists(pid)
    setting.idle.processes.close()


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "mistral_v7"])
def test_a_tool_is_called_as_the_models_own_template_writes_calls(name: str, command: str) -> None:
    """The environment has no tools of its own, and its actions are the final answers."""
    server, chat = ToolServer(command), Chat(family_tokenizer(name))
    style = turn_format("native", think=False, actions_per_turn=1, chat=chat, extract="<answer>")
    changes = {"server": server, "isolation": "loop", "step_timeout_s": 60.0}
    how = setting(chat=chat, format=style, max_length=1 << 16, **changes)
    turns = [style.render_actions([canonical("look", {"where": "left"})]), GO]
    engine = FakeEngine({"0/0/0": [chat.tokens_of(turn) for turn in turns]})
    with asyncio.Runner() as runner:
        (one,) = played(how, asked(length=1), engine, runner)
        runner.run(server.close())
    assert one.success and one.turn_flags.tolist() == [TurnFlag.TOOL_CALL, 0]
    first, second = (chat.decoded(request.tokens) for request in engine.requests)
    assert "Look somewhere." in first and second.startswith(first)
    assert "nothing left, says" in second.removeprefix(first)


def test_what_a_tool_objects_to_is_read_by_the_policy(command: str) -> None:
    server = ToolServer(command)
    engine = FakeEngine({"0/0/0": say(WRONG, GO)})
    with asyncio.Runner() as runner:
        (one,) = played(served(server), asked(length=1), engine, runner)
        runner.run(server.close())
    assert one.turn_flags.tolist() == [TurnFlag.TOOL_CALL | TurnFlag.TOOL_ERROR, 0]
    assert "argument" in TOKENIZER.decode(engine.requests[1].tokens)


def test_a_server_that_ends_is_its_episodes_failure_and_is_started_anew(
    command: str, tmp_path: Path
) -> None:
    server = ToolServer(command)
    with asyncio.Runner() as runner:
        with pytest.raises(EnvironmentFailure, match=r"tool leave for .*env\.tools\.mcp: "):
            played(served(server), asked(), FakeEngine({"0/0/0": say(LEAVE)}), runner)
        engine = FakeEngine({"0/0/0": say(LOOK, GO)})
        (one,) = played(served(server), asked(length=1), engine, runner)
        assert one.success and len(started(tmp_path)) == 2
        runner.run(server.close())


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a server that wants a token."""
    import uvicorn

    monkeypatch.setenv("PLACES_TOKEN", "open sesame".replace(" ", "-"))
    server = fastmcp.FastMCP("places")

    @server.tool
    def look(where: str) -> str:
        return f"nothing {where}"

    class Guarded:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            given = dict(scope.get("headers", [])).get(b"authorization")
            if scope["type"] == "http" and given != b"Bearer open-sesame":
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
            await self.app(scope, receive, send)

    http = uvicorn.Server(uvicorn.Config(Guarded(server.http_app()), port=0, log_level="error"))
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    wait_for(lambda: http.started, "the server")
    yield f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}/mcp"
    http.should_exit = True
    thread.join(timeout=20)


def test_a_server_is_called_by_its_url_with_its_token(address: str) -> None:
    server = ToolServer(address, "PLACES_TOKEN")
    engine = FakeEngine({"0/0/0": say(LOOK, GO)})
    with asyncio.Runner() as runner:
        (one,) = played(served(server), asked(length=1), engine, runner)
        runner.run(server.close())
    assert one.success and "nothing left" in TOKENIZER.decode(engine.requests[1].tokens)
    with pytest.raises(ConfigError, match=r"^env\.tools\.mcp: http"):
        ToolServer(address).probe()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("no-such-command --at all", "no-such-command"),
        (f"{sys.executable} -c 'raise SystemExit(\"no places here\")'", "no places here"),
        ("http://127.0.0.1:9/mcp", "ConnectError"),
    ],
)
def test_a_server_that_cannot_be_reached_is_named_before_the_start(address: str, said: str) -> None:
    config = load(None, ["stages=[{kind: rl, steps: 1}]"])
    config.env.tools.mcp = address
    with pytest.raises(ConfigError, match=rf"^env\.tools\.mcp: .*{said}"):
        check_servers(config)


RECIPE = """
run: {{name: places}}
env: {{name: prompts, tools: {{mcp: {command}}}}}
tasks: {{path: {rows}, prompt: question, answer: answer}}
reward: [exact]
policy: {{max_length: 1024, hidden_size: 32, layers: 1, heads: 2, intermediate_size: 64}}
rollout: {{group_size: 2, max_turns: 2, max_tokens: 16}}
actors: {{count: 2}}
learner: {{groups_per_step: 2, minibatches: 1}}
stages: [{{kind: rl, steps: 2}}]
eval: {{every: 0, final_episodes: 4}}
"""


def test_a_run_starts_the_server_once_for_each_actor(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trains an environment with one turn, whose prompt and reward stay its own."""
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{n} + 1?", "answer": "{n}"}}\n' for n in range(8)))
    Path("recipe.yaml").write_text(RECIPE.format(command=command, rows=rows))
    assert main(["train", "recipe.yaml"]) == 0
    lines = Path("runs/places/metrics.jsonl").read_text().splitlines()
    trained = [row for row in map(parsed, lines) if is_step(row)]
    assert len(trained) == 2 and max(row["train/turns_mean"] for row in trained) > 1
    pids = started(tmp_path)
    assert len(pids) <= 2 + 2, "one for each actor, and two that look at the tools before"
    assert not any(map(psutil.pid_exists, pids))
