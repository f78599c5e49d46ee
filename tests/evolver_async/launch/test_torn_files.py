"""Files of a run directory that a power cut or a full disk has emptied or torn."""

import errno
import os
from pathlib import Path

import pytest

from evolver_async.commands.training import _alert_of_end
from evolver_async.config import Config, ConfigError, StageConfig
from evolver_async.config.load import dump, load, load_written
from evolver_async.launch import run_directory
from evolver_async.launch.creation import measure
from evolver_async.launch.run_directory import Origin
from evolver_async.metrics import launches
from evolver_async.metrics.alerts import ALERTS
from evolver_async.runs.watch import runs
from evolver_async.runs.watch.live import EXACT, _feed_status, exact_values
from evolver_async.runs.watch.throughput import Setup
from evolver_async.runs.watch.view import View
from evolver_async.study.directory import ended, read_failures, record_failure


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("")
    return tmp_path


def test_a_configuration_that_is_cut_off_is_an_error_of_its_file(tmp_path: Path) -> None:
    """Behind the key `stages` all that is missing has a default."""
    config = load(None, ["stages=[{kind: rl, steps: 1}]", "security.keys=/keys"])
    dump(config, path := tmp_path / "config.yaml")
    assert load_written(tmp_path) == config
    whole = path.read_text()
    behind = whole.index("\neval:")
    for end in (0, behind, whole.index("\nsecurity:") + 1, len(whole) - len("...\n")):
        path.write_text(whole[:end])
        with pytest.raises(ConfigError, match=r"config\.yaml: .*cut off"):
            load_written(tmp_path, ["learner.lr=1e-3"])
    path.write_text(whole.removesuffix("\n"))
    assert load_written(tmp_path) == config


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


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_display_goes_on_without_the_address_of_the_buffer(run_dir: Path, content: str) -> None:
    config = Config(stages=[StageConfig(steps=1)])
    view = View(run_dir.name, 0, None, Setup.by_stage(config))
    (run_dir / run_directory.RUN).write_text(content)
    assert _feed_status(view, run_dir, config, True) is None


def test_an_address_that_the_disk_does_not_give_is_an_error_of_its_file(run_dir: Path) -> None:
    (run_dir / run_directory.RUN).mkdir()
    with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
        run_directory.address_of(run_dir)


@pytest.mark.parametrize("content", ["", "[]", "{}", None])
def test_an_end_that_cannot_be_read_is_none(run_dir: Path, content: str | None) -> None:
    assert runs.end(run_dir, 0).state == "finished"
    assert runs.ending_of(run_dir).state == "finished"
    assert ended(run_dir) == ("finished", "")
    (run_dir / runs.END).unlink()
    if content is None:
        (run_dir / runs.END).mkdir()
    else:
        (run_dir / runs.END).write_text(content)
    assert runs.ending_of(run_dir).state == "killed"
    assert ended(run_dir) == ("", "")


def test_an_end_for_which_there_is_no_room_is_told_nevertheless(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run_dir / f".{runs.END}").symlink_to("/dev/full")
    (run_dir / ALERTS).mkdir()
    ending = runs.end(run_dir, 3, "no reward")
    assert ending.code == 3
    assert "end.json is not written: No space left on device" in caplog.text
    _alert_of_end(Config(), run_dir, ending)
    assert "the alert of the end is not written: Is a directory" in caplog.text


def test_facts_of_a_run_are_on_the_disk_before_they_replace_the_old_ones(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    runs.end(run_dir, 0)
    run_directory.announce(run_dir, "ipc://a")
    run_directory.record_origin(run_dir, kind="fork", run="a")
    measure(Config(stages=[StageConfig(steps=1)]), run_dir)
    assert synced == [".end.json", ".run.json", ".origin.json", ".exact.json"]
    assert exact_values(run_dir)


def test_an_agent_is_not_compared_with_policies_of_the_environment_that_numbers_its_tasks(
    run_dir: Path,
) -> None:
    config = Config(stages=[StageConfig(steps=1)])
    config.rollout.agent = "examples.arms:play"
    measure(config, run_dir)
    assert exact_values(run_dir) == {}


@pytest.mark.parametrize("content", ["", '{"kind": "fo', "[1]", "null", "[" * 100_000])
def test_torn_facts_count_as_unknown(run_dir: Path, content: str) -> None:
    run_directory.record_origin(run_dir, kind="fork", run="a")
    assert run_directory.origin_of(run_dir) == Origin("fork", "a")
    for name in (run_directory.ORIGIN, EXACT):
        (run_dir / name).write_text(content)
    assert run_directory.origin_of(run_dir) is None
    assert exact_values(run_dir) == {}


def test_a_configuration_and_failures_are_as_before_if_the_disk_does_not_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty configuration would be read as that of a run with all defaults."""
    path, config = tmp_path / "config.yaml", Config(stages=[StageConfig(steps=1)])
    dump(config, path)
    record_failure(tmp_path, "a-s0", "no memory")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        dump(Config(stages=[StageConfig(steps=2)]), path)
    with pytest.raises(OSError, match="No space"):
        record_failure(tmp_path, "a-s1", "no disk")
    assert load(path) == config and read_failures(tmp_path) == {"a-s0": "no memory"}
