"""Tools of an MCP server: what a run refuses before anything is started. The servers themselves are
in `tests/frameworks/test_tool_servers.py`."""

import sys

import pytest

from actors.checks.config import check, check_servers
from actors.rollout.episode_config import format_name
from evolver_async.config import ConfigError
from evolver_async.config.load import load

SERVED = ["stages=[{kind: rl, steps: 1}]", "env.name=bandit", "env.tools.mcp=no-such-server"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["env.tools.mcp='\"half'"], "env.tools.mcp: is neither"),
        (["env.tools.mcp=' '"], "env.tools.mcp: is neither"),
        (["env.tools.key_env=TOKEN"], "env.tools.key_env"),
        (["launch.kind=serial"], "env.tools.mcp: .*launch.kind"),
        (["rollout.agent=a:b"], "env.tools.mcp: must be empty"),
        (["questioning.kind=goals"], "env.tools.mcp: .*questioning"),
    ],
)
def test_tools_that_nothing_can_call_are_refused(changes: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        load(None, [*SERVED, *changes])


def test_the_extra_with_the_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"^env\.tools\.mcp: .*evolver-async\[mcp\]"):
        check(load(None, SERVED))


def test_formats_and_stages_without_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.checks.config.check_servers", lambda _: None)
    assert format_name(load(None, SERVED)) == "tool_call", "though the environment has no tools"
    check(load(None, SERVED))
    with pytest.raises(ConfigError, match=r"^rollout\.format: chat"):
        check(load(None, [*SERVED, "rollout.format=chat"]))
    shown = [*SERVED, "stages=[{kind: sft, steps: 1}]"]
    with pytest.raises(ConfigError, match=r"^env\.tools\.mcp: .*stages\[0\]"):
        check(load(None, shown))
    check(load(None, [*shown, "env.name=workshop_tools"]))


def test_a_stage_without_the_server_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    override = "stages=[{kind: rl, steps: 1, override: {env: {tools: {mcp: ''}}}}]"
    check_servers(load(None, [*SERVED, override]))
