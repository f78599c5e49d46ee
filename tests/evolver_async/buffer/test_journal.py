"""The journal: what was committed is there; torn tails go, damage is refused and put aside."""

import errno
import fcntl
import math
import multiprocessing
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from launches import DEADLINE_S

from evolver_async.buffer.log.archive import archive_bytes
from evolver_async.buffer.log.disk import DiskFull, SyncError
from evolver_async.buffer.log.journal import Journal
from evolver_async.buffer.log.quarantine import JournalError
from evolver_async.buffer.log.reader import JournalReader
from evolver_async.buffer.log.segment import COMMIT, END, RECORD
from evolver_async.launch.run_directory import locked

SNAPSHOT = b"snapshot"


def fresh(directory, segment_bytes=1 << 20, archive: float = 0) -> Journal:
    journal = Journal(directory, segment_bytes, archive)
    assert list(journal.replay()) == []
    journal.roll(SNAPSHOT)
    return journal


def opened(directory) -> tuple[Journal, list[bytes]]:
    """The journal of a new process, and the heads that it was told."""
    journal = Journal(directory, 1 << 20)
    try:
        return journal, [bytes(head) for head, _ in journal.replay()]
    except JournalError:
        journal.close()
        raise


def heads(directory) -> list[bytes]:
    journal, found = opened(directory)
    journal.close()
    return found


def written(directory, records: int, bodies: int = 10) -> list[bytes]:
    """A journal with so many records, one commit each; returns their heads."""
    journal = fresh(directory)
    names = [f"record {number}".encode() for number in range(records)]
    for name in names:
        journal.append(name, os.urandom(bodies))
        journal.commit()
    journal.close()
    return names


def segment(directory, number=1):
    return directory / f"{number:08d}.log"


def bytes_of(name: bytes, body: int = 10) -> int:
    """The size of a commit of one record."""
    return COMMIT.size + RECORD.size + len(name) + body + END.size


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_committed_records_and_bodies_are_read_back(tmp_path):
    journal = fresh(tmp_path)
    places = {name: journal.append(name, name * 3) for name in (b"a", b"bb", b"")}
    journal.commit()
    assert all(journal.read(place) == name * 3 for name, place in places.items())
    journal.append(b"not committed")
    journal.close()
    again = Journal(tmp_path, 1 << 20)
    found = [(bytes(head), place) for head, place in again.replay()]
    assert found[1:] == list(places.items())
    assert all(again.read(place) == name * 3 for name, place in found[1:])


def test_a_start_reads_the_newest_segment_alone_and_older_bodies_by_their_place(tmp_path):
    journal = fresh(tmp_path)
    places = []
    for number in range(3):
        places.append(journal.append(b"record", b"body %d" % number))
        journal.commit()
        journal.roll(b"snapshot %d" % number)
    journal.append(b"tail")
    journal.commit()
    journal.close()
    journal, found = opened(tmp_path)
    assert found == [b"snapshot 2", b"tail"]
    journal.check_sealed(1)
    assert [journal.read(place) for place in places] == [b"body 0", b"body 1", b"body 2"]


def test_writing_goes_on_after_a_torn_commit(tmp_path):
    names = written(tmp_path, 3)
    os.truncate(segment(tmp_path), segment(tmp_path).stat().st_size - 1)
    journal, _ = opened(tmp_path)
    place = journal.append(b"new", b"body")
    journal.commit()
    assert journal.read(place) == b"body"
    journal.close()
    assert heads(tmp_path) == [SNAPSHOT, *names[:-1], b"new"]


def test_a_flipped_bit_anywhere_stops_loudly_and_changes_nothing(tmp_path):
    written(tmp_path, 5)
    data = segment(tmp_path).read_bytes()
    rng = random.Random(0)
    for _ in range(200):
        damaged = bytearray(data)
        bit = rng.randrange(8 * len(data))
        damaged[bit // 8] ^= 1 << bit % 8
        segment(tmp_path).write_bytes(damaged)
        with pytest.raises(JournalError, match=r"00000001\.log at \d+: damaged"):
            heads(tmp_path)
        assert segment(tmp_path).read_bytes() == damaged


def test_a_damaged_segment_is_copied_with_a_note_of_file_offset_and_cause(tmp_path):
    names = written(tmp_path, 3)
    data = bytearray(segment(tmp_path).read_bytes())
    data[-END.size - 1] ^= 1
    segment(tmp_path).write_bytes(data)
    with pytest.raises(JournalError, match=rf"--resume {tmp_path.parent} --fork NAME$"):
        heads(tmp_path)
    copy = tmp_path / "quarantine" / "00000001.log"
    assert copy.read_bytes() == data
    note = copy.with_suffix(".txt").read_text()
    offset = len(data) - bytes_of(names[-1])
    assert f"{segment(tmp_path)} at {offset}: damaged, a commit of" in note
    os.truncate(segment(tmp_path), offset)  # what the note says, for who knows that power was lost
    assert heads(tmp_path) == [SNAPSHOT, *names[:-1]]
    assert copy.read_bytes() == data


def test_a_missing_or_short_sealed_segment_is_found_at_the_start(tmp_path):
    journal = fresh(tmp_path)
    for number in range(3):
        journal.append(b"record")
        journal.commit()
        journal.roll(b"snapshot %d" % number)
    journal.close()
    data = segment(tmp_path, 2).read_bytes()
    sealed = len(data) - COMMIT.size - END.size
    segment(tmp_path, 2).write_bytes(data[: sealed - 1])
    journal, _ = opened(tmp_path)
    journal.check_sealed(3)
    with pytest.raises(JournalError, match=r"00000002\.log at \d+: damaged, 1 bytes are missing"):
        journal.check_sealed(1)
    journal.close()
    segment(tmp_path, 2).write_bytes(b"")
    journal, _ = opened(tmp_path)
    with pytest.raises(JournalError, match=r"00000002\.log: empty"):
        journal.check_sealed(1)
    journal.close()
    segment(tmp_path, 2).unlink()
    journal, _ = opened(tmp_path)
    with pytest.raises(JournalError, match=r"00000002\.log: missing; .* --resume .* --fork NAME"):
        journal.check_sealed(1)
    journal.close()


def test_a_newest_segment_that_was_written_and_is_gone_is_missed(tmp_path):
    journal = fresh(tmp_path)
    journal.roll(b"second")
    journal.close()
    segment(tmp_path, 2).rename(tmp_path / "gone")
    with pytest.raises(JournalError, match=r"00000002\.log: missing"):
        heads(tmp_path)
    segment(tmp_path, 2).write_bytes((tmp_path / "gone").read_bytes()[:-1])
    with pytest.raises(JournalError, match=r"00000002\.log at 0: damaged"):
        heads(tmp_path)


def test_a_snapshot_cut_short_is_never_a_fresh_start_where_there_was_a_run(tmp_path):
    journal = fresh(tmp_path)
    journal.roll(b"second")
    journal.drop(2)
    journal.close()
    os.truncate(segment(tmp_path, 2), 20)
    with pytest.raises(JournalError, match=r"00000002\.log at 0: damaged"):
        heads(tmp_path)


def test_a_segment_whose_first_commit_is_torn_was_never_there(tmp_path):
    names = written(tmp_path, 2)
    unsealed = segment(tmp_path).read_bytes()  # a crash comes before the old segment is sealed
    journal, _ = opened(tmp_path)
    journal.roll(b"second")
    journal.close()
    whole = segment(tmp_path, 2).read_bytes()
    for size in (0, 5, len(whole) - 1):
        segment(tmp_path).write_bytes(unsealed)
        segment(tmp_path, 2).write_bytes(whole[:size])
        assert heads(tmp_path) == [SNAPSHOT, *names]
        assert not segment(tmp_path, 2).exists()


def test_a_changed_body_of_a_sealed_segment_is_noticed_when_it_is_read(tmp_path):
    journal = fresh(tmp_path)
    place = journal.append(b"record", b"body")
    journal.commit()
    journal.roll(b"second")
    data = segment(tmp_path).read_bytes()
    segment(tmp_path).write_bytes(data.replace(b"body", b"bodx"))
    with pytest.raises(JournalError, match=rf"00000001\.log at {place[1]}: damaged, a body of 4"):
        journal.read(place)
    assert (tmp_path / "quarantine" / "00000001.log").exists()
    os.truncate(segment(tmp_path), place[1] + 1)
    with pytest.raises(JournalError, match="1 of 4 bytes are there"):
        journal.read(place)


@pytest.mark.parametrize(("archive", "kept"), [(0, 0), (150, 2), (math.inf, 3)])
def test_old_segments_go_or_are_archived(tmp_path, archive, kept):
    journal = fresh(tmp_path, archive=archive)
    for number in range(3):
        journal.roll(b"snapshot %d" % number)
    journal.drop(3)
    journal.drop(99)
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["00000004.log"]
    archived = sorted(path.name for path in (tmp_path / "archive").glob("*.log"))
    assert archived == ["00000001.log", "00000002.log", "00000003.log"][3 - kept :]
    journal.close()
    assert heads(tmp_path) == [b"snapshot 2"]


@pytest.mark.parametrize("archive", [150, math.inf])
def test_what_a_link_in_the_place_of_the_archive_leads_to_is_left_alone(tmp_path, archive):
    others = tmp_path / "others"
    others.mkdir()
    foreign = [others / f"{number:08d}.log" for number in (1, 7)]
    for one in foreign:
        one.write_bytes(b"x" * 100)
    journal = fresh(tmp_path / "journal", archive=archive)
    link = tmp_path / "journal" / "archive"
    link.symlink_to(others)
    journal.archive.trim()
    for number in range(2):
        journal.roll(b"snapshot %d" % number)
    journal.drop(99)
    journal.close()
    assert [one.read_bytes() for one in foreign] == [b"x" * 100] * 2
    assert not link.is_symlink() and len(list(others.iterdir())) == 2
    assert sorted(path.name for path in link.iterdir()) == ["00000001.log", "00000002.log"]


def test_a_link_in_the_archive_is_unlinked(tmp_path):
    journal = fresh(tmp_path / "journal", archive=150)
    archive, kept = tmp_path / "journal" / "archive", tmp_path / "kept"
    archive.mkdir()
    kept.write_bytes(b"x" * 1000)
    (archive / "00000000.log").symlink_to(kept)
    (archive / "00000001.log").write_bytes(b"x" * 160)
    journal.archive.trim()
    journal.close()
    assert kept.stat().st_size == 1000 and not any(archive.iterdir())


def test_a_copy_that_a_person_put_beside_the_segments_is_left_alone(tmp_path):
    names = written(tmp_path, 3)
    (tmp_path / "archive").mkdir()
    copies = [tmp_path / "00000001.damaged.log", tmp_path / "archive" / "notes.log"]
    for copy in copies:
        copy.write_bytes(b"x" * 100)
    journal = Journal(tmp_path, 1 << 20, archive_bytes=1)
    assert [bytes(head) for head, _ in journal.replay()] == [SNAPSHOT, *names]
    journal.roll(SNAPSHOT)
    journal.drop(journal.newest)
    journal.close()
    assert all(copy.exists() for copy in copies) and list(JournalReader(tmp_path).numbers) == [2]


def test_what_the_configuration_says_of_the_archive():
    assert [archive_bytes(text) for text in ("none", "all", "150")] == [0, math.inf, 150]


def _hold(directory, held, done):
    journal = Journal(directory, 1 << 20)
    held.set()
    done.wait(DEADLINE_S)
    journal.close()


@pytest.mark.process
def test_a_journal_in_use_is_refused(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path, held, done))
    process.start()
    try:
        assert held.wait(DEADLINE_S)
        with pytest.raises(JournalError, match="in use by another process"):
            Journal(tmp_path, 1 << 20)
    finally:
        done.set()
        process.join(DEADLINE_S)
    Journal(tmp_path, 1 << 20).close()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(JournalError, match=f"{tmp_path.name}: cannot be locked: Function not"):
        Journal(tmp_path, 1 << 20)
    named = pytest.raises(OSError, match=f"Function not implemented: .*{tmp_path.name}/lock")
    with named, locked(tmp_path):
        pass


def test_what_the_disk_refuses_is_not_promised_and_is_written_later_once(tmp_path):
    journal = fresh(tmp_path)
    journal.append(b"kept")
    journal.commit()
    place = journal.append(b"refused", b"x" * 1000)
    with largest_file(journal.size + 100):
        for _ in range(3):
            with pytest.raises(DiskFull, match="file too large"):
                journal.commit()
        assert journal.problem and journal.free == 0
        assert segment(tmp_path).stat().st_size == journal.size
    with pytest.raises(DiskFull):
        journal.commit()  # not before the disk was measured again
    journal.measure()
    journal.commit()
    assert not journal.problem and journal.read(place) == b"x" * 1000
    journal.close()
    assert heads(tmp_path) == [SNAPSHOT, b"kept", b"refused"]


def test_a_disk_that_fails_is_named(tmp_path, monkeypatch):
    journal = fresh(tmp_path)
    journal.append(b"lost")

    def fail(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(os, "write", fail)
        with pytest.raises(OSError, match=f"nput/output error.*{tmp_path.name}"):
            journal.commit()
    journal.close()
    assert heads(tmp_path) == [SNAPSHOT]


def test_without_room_for_a_new_segment_the_old_one_goes_on(tmp_path):
    journal = fresh(tmp_path)
    with largest_file(1000), pytest.raises(DiskFull):
        journal.roll(b"x" * 1000)
    assert not journal.problem
    journal.append(b"record")
    journal.commit()
    journal.close()
    assert heads(tmp_path) == [SNAPSHOT, b"record"]


def test_what_a_killed_process_left_is_synced_before_anybody_hears_of_it(tmp_path, monkeypatch):
    """Read from memory, it would be answered DUP, and a power cut could still take it."""
    names = written(tmp_path, 1)
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    assert heads(tmp_path) == [SNAPSHOT, *names]
    assert synced == [segment(tmp_path).stat().st_size]


def test_after_a_failed_sync_nothing_is_written_and_nothing_unsynced_is_read(tmp_path, monkeypatch):
    journal = fresh(tmp_path)
    journal.append(b"kept")
    journal.commit()
    journal.append(b"lost")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(SyncError, match="Input/output error"):
            journal.commit()
    with pytest.raises(SyncError):
        journal.commit()
    journal.close()
    assert heads(tmp_path) == [SNAPSHOT, b"kept"]
