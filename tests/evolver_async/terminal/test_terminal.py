"""Texts of others reach a terminal as text alone."""

import io
import json
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.text import Text

from evolver_async.cli import main
from evolver_async.config import Config, StageConfig
from evolver_async.config.load import dump
from evolver_async.metrics.alerts import alert
from evolver_async.runs.watch import runs
from evolver_async.terminal import harmless, plain
from evolver_async.terminal.console import SafeConsole

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e\ud800"


def test_a_terminal_obeys_nothing_in_a_text() -> None:
    assert harmless(f"a{HOSTILE}b\n\tc é 文 😀") == "a?]0;owned??[2J?31m???b\n\tc é 文 😀"
    assert plain("a\n b\x1b") == "a b?"


def test_a_panel_keeps_its_own_colours_alone() -> None:
    console = SafeConsole(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(Panel(Text("x\x1b[2Jy", "red"), title=Text("\x1b]0;t\x07")))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "\x1b[31m" in shown and "x?[2Jy" in shown
    assert "\x1b[2J" not in shown and "\x1b]" not in shown and "\x07" not in shown


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has ended, whose name, alert and reason want to be obeyed."""
    path = tmp_path / "runs" / "a\x1b[2Jb"
    path.mkdir(parents=True)
    dump(Config(stages=[StageConfig(steps=5)]), path / "config.yaml")
    row = {"lineage": 1, "step": 1, "stage_kind": "rl", "time_s": 1.0}
    (path / "metrics.jsonl").write_text(f"{json.dumps(row)}\n")
    alert(path, "title\x1b[31m", "text\x1b]0;x\x07", console=True)
    runs.end(path, 3, "reason\x1b[8m")
    return path


@pytest.mark.parametrize("command", ["runs", "watch", "status"])
def test_no_command_hands_a_sequence_on(
    command: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"runs": [run_dir.parent], "watch": ["--once", run_dir], "status": [run_dir]}
    main([command, *map(str, arguments[command])])
    said = capsys.readouterr()
    assert "a?[2Jb" in said.out + said.err
    assert not any(character in said.out + said.err for character in "\x1b\x07\x9b")
