"""A kept run of the present formats is opened; one of another format is refused by its number.

`tests/data/kept_run` is a run as a program of these formats has left it: a tiny preset after two
steps in the bandit, without logs and gauges. A change that cannot open it needs another number in
`file_formats`, an entry in CHANGELOG.md, and a kept run that is made anew.
"""

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from evolver_async import file_formats
from evolver_async.buffer.log.quarantine import JournalError
from evolver_async.buffer.log.reader import JournalReader
from evolver_async.buffer.state import records
from evolver_async.checkpoint import history, shards
from evolver_async.checkpoint.checkpoints import MANIFEST, CheckpointError
from evolver_async.cli import main
from evolver_async.config.load import load_written
from evolver_async.config.values.config_error import ConfigError
from evolver_async.file_formats import JOURNAL_FORMAT, RUN
from evolver_async.launch.resumption import FinishedRun, resume
from evolver_async.runs.results.loaded_run import load_run
from learner.state import LearnerState

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return shutil.copytree(ROOT / "tests" / "data" / "kept_run", tmp_path / "kept")


def test_a_kept_run_is_opened(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--once", str(kept)]) == 0
    assert "finished" in capsys.readouterr().out
    run = load_run(kept)
    assert list(run.steps["step"]) == [1, 2]
    assert sum(one.fate == "trained" for one in run.trajectories) == 8
    chosen, manifest = history.choose(kept / "checkpoints", kept.name, None)
    assert manifest.step == 2 and LearnerState.read(chosen).take == 2
    assert shards.read(chosen, "model")
    with pytest.raises(FinishedRun):  # after all that a resume reads was read
        resume(kept, [])


def test_the_changelog_has_the_numbers() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    rows = re.findall(r"^\| .*`format`.*\| (\d+) \|", text, re.M)
    own = (file_formats.RUN_FORMAT, file_formats.JOURNAL_FORMAT, file_formats.CHECKPOINT_FORMAT)
    assert tuple(map(int, rows)) == own


@pytest.mark.parametrize("facts", [{"format": 99, "version": "7.8"}, {"address": "ipc:///none"}])
def test_a_run_of_another_format_is_refused_with_both_versions(
    kept: Path, facts: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    (kept / RUN).write_text(json.dumps(facts))
    (kept / "config.yaml").write_text("what: [is, this\n")
    with pytest.raises(ConfigError) as refused:
        load_written(kept)
    said = str(refused.value)
    assert str(kept) in said and str(file_formats.numbered()["version"]) in said
    assert ("99" in said and "7.8" in said) == ("format" in facts)
    for command in (["watch", "--once"], ["train", "--resume"], ["export"]):
        out = ["out"] if command == ["export"] else []
        assert main([*command, str(kept), *out]) == 2
        assert said in capsys.readouterr().err


def test_a_file_without_its_last_line_was_cut_off_or_is_of_no_format(kept: Path) -> None:
    text = (kept / "config.yaml").read_text()
    (kept / "config.yaml").write_text(text.removesuffix("...\n"))
    with pytest.raises(ConfigError, match=r"cut off .* or written before"):
        load_written(kept)


def test_a_checkpoint_of_another_format_is_refused_by_its_number(kept: Path) -> None:
    for path in (kept / "checkpoints").glob(f"*/{MANIFEST}"):
        path.write_text(json.dumps({"format": 99, "content": ["of another kind"]}))
    with pytest.raises(CheckpointError, match=r"has format 99; .* reads format 2"):
        history.choose(kept / "checkpoints", kept.name, None)


@pytest.mark.parametrize("change", [{}, {"position": 7}])
def test_a_journal_of_another_format_is_refused_by_its_number(
    kept: Path, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    ((snapshot, _), *_) = JournalReader(kept / "journal").read()
    assert isinstance(snapshot, records.StateSnapshot) and snapshot.format == JOURNAL_FORMAT
    other = msgspec.to_builtins(snapshot) | {"format": 99} | change
    with pytest.raises(ValueError, match=rf"has format 99; .* reads format {JOURNAL_FORMAT}"):
        records.decode(msgspec.msgpack.encode(other))
    monkeypatch.setattr(records, "JOURNAL_FORMAT", 98)
    with pytest.raises(JournalError, match=rf"has format {JOURNAL_FORMAT}; .* reads format 98"):
        JournalReader(kept / "journal").replayed()
