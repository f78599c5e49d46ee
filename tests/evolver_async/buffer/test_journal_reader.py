"""The journal is read while it is written, and nothing of it is changed."""

import os
from pathlib import Path

import pytest
from reported_runs import SEGMENT_BYTES, MadeRun

from evolver_async.buffer.log import reader as reader_module
from evolver_async.buffer.log.quarantine import JournalError
from evolver_async.buffer.log.reader import JournalReader
from evolver_async.buffer.state import records
from evolver_async.runs.results.final_ledger import final_ledger
from evolver_async.wire.messages import Kept


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_live_journal_is_read_and_not_changed(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    run.step("left")
    before = contents(run.run_dir)
    reader = JournalReader(run.run_dir / "journal")
    read = list(reader.read())
    assert contents(run.run_dir) == before
    arrived = [place for record, place in read if isinstance(record, records.Arrived)]
    loaded = [reader.trajectory(place) for place in arrived]
    assert [one and (one.group_id, one.member) for one in loaded] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    run.step("right")
    assert len(list(reader.read())) > len(read), "the journal goes on"
    run.close()


def test_an_unfinished_commit_at_the_end_is_not_read(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    run.step()
    run.close()
    path = run.run_dir / "journal" / "00000001.log"
    whole = list(JournalReader(path.parent).read())
    path.write_bytes(path.read_bytes()[:-3])
    assert len(list(JournalReader(path.parent).read())) == len(whole) - 1
    assert path.stat().st_size > 0 and not (path.parent / "quarantine").exists()


def test_a_segment_whose_first_commit_is_unfinished_hides_no_ledger(tmp_path: Path) -> None:
    """A start removes it and replays the segment before; so do the ledger and the newest stage."""
    run = MadeRun(tmp_path / "run")
    run.step("left")
    run.close()
    whole = final_ledger(run.run_dir, run.config)
    assert any(whole[1]["received"].values())
    first = run.run_dir / "journal" / "00000001.log"
    first.with_name("00000002.log").write_bytes(first.read_bytes()[:40])
    assert final_ledger(run.run_dir, run.config) == whole
    assert JournalReader(first.parent).newest_stage() == 0


def test_archived_segments_are_read_and_removed_ones_are_gone(tmp_path: Path) -> None:
    for archive in ("all", "none"):
        run = MadeRun(tmp_path / archive, segment_bytes=SEGMENT_BYTES, archive=archive)
        for _ in range(12):
            run.step("left", "right", "up")
            run.world.ask("learner", Kept(take=run.takes))
        run.close()
        reader = JournalReader(run.run_dir / "journal")
        assert reader.numbers[-1] > 2
        assert (reader.numbers[0] == 1) == (archive == "all")
        places = [place for one, place in reader.read() if isinstance(one, records.Arrived)]
        assert all(reader.trajectory(place) is not None for place in places)
        assert (len(places) == 48) == (archive == "all")
    gone = (1, *places[0][1:])
    assert reader.trajectory(gone) is None and not reader.kept(gone)


def test_a_long_archive_is_read_with_few_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "MAPPED", 2)
    run = MadeRun(tmp_path / "run", segment_bytes=SEGMENT_BYTES, archive="all")
    for _ in range(12):
        run.step("left", "right", "up")
        run.world.ask("learner", Kept(take=run.takes))
    run.close()
    reader = JournalReader(run.run_dir / "journal")
    places = [place for one, place in reader.read() if isinstance(one, records.Arrived)]
    assert len({place[0] for place in places}) > 4
    before = len(os.listdir("/proc/self/fd"))
    for place in (*places, *reversed(places)):
        assert reader.trajectory(place) is not None
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_damage_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    run.step()
    run.step()
    run.close()
    path = run.run_dir / "journal" / "00000001.log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"00000001\.log at \d+"):
        list(JournalReader(path.parent).read())
    assert not (path.parent / "quarantine").exists()
