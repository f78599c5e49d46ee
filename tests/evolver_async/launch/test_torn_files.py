"""Files of a run directory that a power cut or a full disk has emptied or torn."""

import json
import os
from pathlib import Path

import pytest

from evolver_async.config import ConfigError
from evolver_async.launch import run_directory
from evolver_async.metrics import launches
from evolver_async.watch import runs
from evolver_async.watch.live import EXACT, exact_values


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("")
    return tmp_path


@pytest.mark.parametrize("content", ["", '{"address": "ipc', "[]"])
def test_a_launch_goes_on_counting_where_its_record_is_lost(run_dir: Path, content: str) -> None:
    for number in (1, 2):
        launches.record(run_dir, "bandit", [], {})
        assert run_directory.announce(run_dir, "ipc://a") == number
    (run_dir / run_directory.RUN).write_text(content)
    with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
        run_directory.address_of(run_dir)
    launches.record(run_dir, None, [], {})
    assert run_directory.announce(run_dir, "ipc://b") >= 3
    assert run_directory.address_of(run_dir) == "ipc://b"


def test_an_end_that_is_not_written_whole_is_none(run_dir: Path) -> None:
    assert runs.end(run_dir, 0).state == "finished"
    assert runs.ending_of(run_dir).state == "finished"
    (run_dir / runs.END).write_text("")
    assert runs.ending_of(run_dir).state == "killed"


def test_an_end_for_which_there_is_no_room_is_told_nevertheless(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_text", full)
    assert runs.end(run_dir, 130).code == 130
    assert "is not written: No space left on device" in caplog.text


def test_torn_facts_count_as_unknown(run_dir: Path) -> None:
    run_directory.record_origin(run_dir, kind="fork", run="a")
    assert run_directory.origin_of(run_dir) == {"kind": "fork", "run": "a"}
    for name in (run_directory.ORIGIN, EXACT):
        (run_dir / name).write_text(json.dumps({"kind": "fork"})[:-3])
    assert run_directory.origin_of(run_dir) is None
    assert exact_values(run_dir) is None
