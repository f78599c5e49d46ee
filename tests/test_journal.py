"""The journal: what was committed is there; torn tails go, damage elsewhere is refused."""

import multiprocessing
import os
import random
import resource

import pytest

from evolver_async.buffer.journal import COMMIT, RECORD, Journal, JournalError

SNAPSHOT = b"snapshot"


def fresh(directory, segment_bytes=1 << 20, archive=False) -> Journal:
    journal = Journal(directory, segment_bytes, archive)
    assert list(journal.replay()) == []
    journal.roll(SNAPSHOT)
    return journal


def heads(directory, segment_bytes=1 << 20) -> list[bytes]:
    journal = Journal(directory, segment_bytes, False)
    try:
        return [bytes(head) for head, _ in journal.replay()]
    finally:
        journal.close()


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


def test_committed_records_and_bodies_are_read_back(tmp_path):
    journal = fresh(tmp_path)
    places = {name: journal.append(name, name * 3) for name in (b"a", b"bb", b"")}
    journal.commit()
    assert all(journal.read(place) == name * 3 for name, place in places.items())
    journal.append(b"not committed")
    journal.close()
    again = Journal(tmp_path, 1 << 20, False)
    found = [(bytes(head), place) for head, place in again.replay()]
    assert found[1:] == list(places.items())
    assert all(again.read(place) == name * 3 for name, place in found[1:])


def test_a_commit_torn_at_any_byte_is_cut_off_and_the_rest_is_intact(tmp_path):
    names = written(tmp_path, 4)
    data = segment(tmp_path).read_bytes()
    last = COMMIT.size + RECORD.size + len(names[-1]) + 10
    for size in range(len(data) - last, len(data)):
        segment(tmp_path).write_bytes(data[:size])
        assert heads(tmp_path) == [SNAPSHOT, *names[:-1]]
        assert segment(tmp_path).stat().st_size == len(data) - last
    segment(tmp_path).write_bytes(data[:-last] + bytes(last))
    assert heads(tmp_path) == [SNAPSHOT, *names[:-1]]


def test_writing_goes_on_after_a_torn_commit(tmp_path):
    names = written(tmp_path, 3)
    os.truncate(segment(tmp_path), segment(tmp_path).stat().st_size - 1)
    journal = Journal(tmp_path, 1 << 20, False)
    list(journal.replay())
    place = journal.append(b"new", b"body")
    journal.commit()
    assert journal.read(place) == b"body"
    journal.close()
    assert heads(tmp_path) == [SNAPSHOT, *names[:-1], b"new"]


def test_a_flipped_bit_in_the_middle_stops_loudly_and_changes_nothing(tmp_path):
    names = written(tmp_path, 5)
    data = segment(tmp_path).read_bytes()
    last = COMMIT.size + RECORD.size + len(names[-1]) + 10
    rng = random.Random(0)
    for _ in range(200):
        damaged = bytearray(data)
        bit = rng.randrange(8 * (len(data) - last))
        damaged[bit // 8] ^= 1 << bit % 8
        segment(tmp_path).write_bytes(damaged)
        with pytest.raises(JournalError, match=r"00000001\.log at \d+: damaged"):
            heads(tmp_path)
        assert segment(tmp_path).read_bytes() == damaged


def test_a_torn_or_missing_older_segment_is_damage(tmp_path):
    journal = fresh(tmp_path)
    for number in range(3):
        journal.append(b"record")
        journal.commit()
        journal.roll(b"snapshot %d" % number)
    journal.close()
    whole = segment(tmp_path, 2).read_bytes()
    for damaged in (whole[:-1], b""):
        segment(tmp_path, 2).write_bytes(damaged)
        with pytest.raises(JournalError, match=r"00000002\.log at \d+: damaged"):
            heads(tmp_path)
    segment(tmp_path, 2).unlink()
    with pytest.raises(JournalError, match=r"00000002\.log: missing"):
        heads(tmp_path)


def test_a_segment_whose_first_commit_is_torn_was_never_there(tmp_path):
    names = written(tmp_path, 2)
    journal = Journal(tmp_path, 1 << 20, False)
    list(journal.replay())
    journal.roll(b"second")
    journal.close()
    whole = segment(tmp_path, 2).read_bytes()
    for size in (0, 5, len(whole) - 1):
        segment(tmp_path, 2).write_bytes(whole[:size])
        assert heads(tmp_path) == [SNAPSHOT, *names]
        assert not segment(tmp_path, 2).exists()


@pytest.mark.parametrize("archive", [False, True])
def test_old_segments_go_or_are_archived(tmp_path, archive):
    journal = fresh(tmp_path, archive=archive)
    for number in range(3):
        journal.roll(b"snapshot %d" % number)
    journal.drop(3)
    journal.drop(99)
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["00000004.log"]
    assert len(list((tmp_path / "archive").glob("*.log"))) == (3 if archive else 0)
    journal.close()
    assert heads(tmp_path) == [b"snapshot 2"]


def _hold(directory, held, done):
    journal = Journal(directory, 1 << 20, False)
    held.set()
    done.wait(30)
    journal.close()


def test_a_journal_in_use_is_refused(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path, held, done))
    process.start()
    try:
        assert held.wait(30)
        with pytest.raises(JournalError, match="in use by another process"):
            Journal(tmp_path, 1 << 20, False)
    finally:
        done.set()
        process.join(30)
    Journal(tmp_path, 1 << 20, False).close()


def test_what_the_disk_refuses_is_not_promised_and_can_be_written_later(tmp_path):
    journal = fresh(tmp_path)
    journal.append(b"kept")
    journal.commit()
    journal.append(b"refused", b"x" * 1000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size + 100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert segment(tmp_path).stat().st_size == journal.size
    journal.commit()
    journal.close()
    assert heads(tmp_path) == [SNAPSHOT, b"kept", b"refused"]
