"""Own code of a run: which files it is, their copies, and the commit of the working directory."""

import argparse
import os
import subprocess
from pathlib import Path

import pytest

from evolver_async.commands import training
from evolver_async.config import Config, StageConfig
from evolver_async.config.sections.reward import TermConfig
from evolver_async.launch.own_code import changed, copy_of, digests, git_state, keep, own_code
from evolver_async.metrics.launches import launches

FILES = {
    "mine_env/__init__.py": "",
    "mine_env/maze.py": "import numpy, torch.nn\nfrom . import maps\nimport evolver_async\n",
    "mine_env/maps.py": "from mine_tools.draw import line\nimport json\n",
    "mine_env/unused.py": "raise SystemExit\n",
    "mine_tools/draw.py": "raise SystemExit  # imported by nobody here\ndef line(): ...\n",
    "mine_rewards.py": "def late():\n    import mine_late\n",
    "mine_late.py": "this is no Python\n",
    "site-packages/installed_rewards.py": "",
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of own modules, which are found from there; one is installed."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def named() -> Config:
    """A configuration that names own functions in a section, in a list and in a stage."""
    made = Config(stages=[StageConfig(steps=1)])
    made.env.name = "mine_env.maze:Maze"
    made.reward.terms = [TermConfig("installed_rewards:bonus"), TermConfig("success")]
    made.stages[0].override = {"advantage": {"kind": "mine_rewards:late"}}
    made.buffer.address = "mine_env.unused:8080"  # an address, no import path
    return made


def test_own_code_is_what_is_named_and_what_that_imports(written: Path) -> None:
    found = own_code([named(), Config()])
    assert {*found} == {
        *("mine_env/__init__.py", "mine_env/maze.py", "mine_env/maps.py", "mine_tools/draw.py"),
        *("mine_rewards.py", "mine_late.py"),
    }
    assert all(path == written / name for name, path in found.items())
    assert own_code([Config()]) == {}


def test_a_copy_is_kept_of_every_content(written: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code = own_code([named()])
    first = keep(code, run_dir)
    assert first == digests(code) and changed(first, digests(code)) == ""
    (written / "mine_env/maps.py").write_text("SIZE = 2\n")
    second = keep(code, run_dir)
    assert changed(first, second) == "mine_env/maps.py has changed"
    for kept, text in ((first, FILES["mine_env/maps.py"]), (second, "SIZE = 2\n")):
        assert copy_of(run_dir, "mine_env/maps.py", kept["mine_env/maps.py"]).read_text() == text
    fewer = {name: digest for name, digest in second.items() if name != "mine_late.py"}
    assert changed(second, fewer) == "mine_late.py is gone"
    assert changed(fewer, second) == "mine_late.py is new"


def git(directory: Path, *arguments: str) -> str:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": "/dev/null"}
    who |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    done = subprocess.run(
        ["git", *arguments],
        cwd=directory,
        env=os.environ | who,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_commit_and_changes_since_are_known(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None, "no repository"
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None, "no commit yet"
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "one")
    state = git_state(tmp_path)
    assert state is not None and (state.commit, state.dirty) == (
        git(tmp_path, "rev-parse", "HEAD"),
        False,
    )
    (tmp_path / "a").write_text("2")
    state = git_state(tmp_path)
    assert state is not None and state.dirty
    assert git_state(tmp_path / "gone") is None


def test_every_launch_records_own_code_and_commit(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, args = tmp_path / "run", argparse.Namespace(positional=[], resume=tmp_path / "run")
    args.step = args.fork = None
    run_dir.mkdir()
    monkeypatch.chdir(written)
    training._announce(run_dir, named(), args)
    (written / "mine_late.py").write_text("")
    git(written, "init", "-q")
    git(written, "add", ".")
    git(written, "commit", "-q", "-m", "one")
    training._announce(run_dir, named(), args)
    first, second = launches(run_dir)
    assert first["git"] is None and second["git"]["dirty"] is False
    assert second["git"]["commit"] == git(written, "rev-parse", "HEAD")
    assert changed(first["code"], second["code"]) == "mine_late.py has changed"
    assert copy_of(run_dir, "mine_late.py", second["code"]["mine_late.py"]).read_text() == ""
