"""The shared-memory weight channel: whole or not at all, newest kept, nothing left behind."""

import errno
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from launches import DEADLINE_S
from torch import Tensor
from weight_heads import check_heads

from evolver_async.process import mounts
from evolver_async.process.private_directories import LOCK, OWNER, PREFIX, claim, owned, sweep
from evolver_async.schema import WeightId
from evolver_async.weights.channel.byte_layout import views
from evolver_async.weights.channel.interface import WeightsCorrupt, WeightsGone
from evolver_async.weights.channel.snapshot import WeightSnapshot
from evolver_async.weights.channel.weight_source import Part, WholeTensors
from evolver_async.weights.shm import ShmPublisher, ShmReceiver
from evolver_async.weights.snapshot_file import SnapshotFile


def version(step: int, lineage: int = 1) -> WeightId:
    return WeightId(lineage=lineage, step=step)


def filled(value: float, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"a": torch.full((size,), value), "b": torch.full((3, 5), value)}


def publisher(directory: Path, *, keep: int = 2, background: bool = False) -> ShmPublisher:
    return ShmPublisher(directory / "w", keep=keep, background=background)


@pytest.mark.parametrize("background", [False, True])
def test_what_is_published_is_what_is_fetched(tmp_path: Path, background: bool) -> None:
    tensors = {
        "matrix": torch.randn(7, 5),
        "transposed": torch.randn(4, 6).t(),
        "bf16": torch.randn(3, 3).bfloat16(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "mask": torch.tensor([True, False, True]),
    }
    sender = publisher(tmp_path, background=background)
    receiver = ShmReceiver(sender.address)
    assert receiver.head() is None
    sender.publish(version(3), tensors)
    sender.wait()
    assert receiver.head() == version(3)
    fetched = receiver.fetch(version(3))
    assert list(fetched) == list(tensors)
    for name, tensor in tensors.items():
        assert fetched[name].dtype == tensor.dtype
        assert torch.equal(fetched[name], tensor)
    sender.close()


class HeldSource(WholeTensors):
    """Tensors that nobody can copy until `go` is set."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.go = threading.Event()

    def parts(self) -> Iterator[list[Part]]:
        self.go.wait()
        yield from super().parts()


def test_a_version_is_copied_beside_the_caller_who_waits_before_a_change(tmp_path: Path) -> None:
    sender = ShmPublisher(tmp_path / "weights")
    if sender._copier is None:
        pytest.skip("one core: the caller copies")
    source = HeldSource(filled(1.0))
    sender.publish(version(1), source)  # returns, though nothing is copied
    waiting = threading.Thread(target=sender.copied)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "the copy has not begun"
    assert ShmReceiver(sender.address).available() == []
    source.go.set()
    waiting.join()
    sender.wait()
    assert bool((ShmReceiver(sender.address).fetch(version(1))["a"] == 1.0).all())
    sender.close()


class BrokenSource(WholeTensors):
    def parts(self) -> Iterator[list[Part]]:
        raise RuntimeError("no such memory")


@pytest.mark.parametrize("background", [False, True])
def test_an_error_of_the_copy_reaches_the_caller(tmp_path: Path, background: bool) -> None:
    sender = publisher(tmp_path, background=background)
    with pytest.raises(RuntimeError, match="no such memory"):
        sender.publish(version(1), BrokenSource(filled(1.0)))
        sender.copied()
    sender.close()


class HalfSource(WholeTensors):
    """Source whose tensors after the first one come when `go` is set."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.go = threading.Event()

    def parts(self) -> Iterator[list[Part]]:
        (whole,) = super().parts()
        yield whole[:1]
        self.go.wait()
        yield whole[1:]


def test_the_first_bytes_can_be_sent_while_the_others_are_copied() -> None:
    snapshot, source = WeightSnapshot(summed=False), HalfSource(filled(1.0))
    with ThreadPoolExecutor(1) as beside:
        snapshot.stage(version(1), source, 1, beside)
        snapshot.await_bytes(4000)
        assert bool((snapshot.bytes_N[:4000].view(torch.float32) == 1.0).all())
        rest = threading.Thread(target=snapshot.await_bytes, args=(source.layout.size,))
        rest.start()
        rest.join(0.2)
        assert rest.is_alive(), "the other tensor has not come"
        source.go.set()
        rest.join()
    found = views(snapshot.bytes_N, snapshot.tensors)
    assert bool((found["b"] == 1.0).all())


class OvertakenSnapshot(WeightSnapshot):
    """Snapshot whose copies end in the other thread at the moment at which this one looks."""

    waited = 0
    event: "OvertakenSnapshot | None" = None

    @property
    def _copied(self) -> "OvertakenSnapshot | None":
        found, self.event = self.event, None
        return found

    @_copied.setter
    def _copied(self, value: None) -> None:
        self.event = value

    def synchronize(self) -> None:
        self.waited += 1


def test_two_threads_can_wait_for_the_copies_from_a_gpu() -> None:
    snapshot = OvertakenSnapshot()
    snapshot.event = snapshot
    snapshot.finish_copies()
    assert snapshot.waited == 1


def test_the_caller_may_change_its_tensors_once_they_are_copied(tmp_path: Path) -> None:
    sender = publisher(tmp_path, background=True)
    tensors = filled(1.0, size=1 << 20)
    sender.publish(version(1), tensors)
    sender.copied()
    tensors["a"].fill_(2.0)
    sender.wait()
    assert bool((ShmReceiver(sender.address).fetch(version(1))["a"] == 1.0).all())
    sender.close()


@pytest.mark.parametrize("background", [False, True])
def test_newest_and_retained_versions_are_kept(tmp_path: Path, background: bool) -> None:
    sender = publisher(tmp_path, keep=2, background=background)
    receiver = ShmReceiver(sender.address)
    for step in range(6):
        sender.publish(version(step), filled(step), retain=step == 1)
    sender.wait()
    assert receiver.available() == [version(1), version(4), version(5)]
    with pytest.raises(WeightsGone, match=r"1\.3"):
        receiver.fetch(version(3))
    sender.release(version(1))
    assert receiver.available() == [version(4), version(5)]
    sender.close()
    assert receiver.head() is None and receiver.available() == []


def test_of_versions_that_wait_the_newest_and_the_retained_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, commit = threading.Event(), SnapshotFile.commit

    def late(snapshot: SnapshotFile, path: Path, totals: dict[str, int]) -> None:
        begin.wait(DEADLINE_S)
        commit(snapshot, path, totals)

    monkeypatch.setattr(SnapshotFile, "commit", late)
    sender = publisher(tmp_path, keep=2, background=True)
    for step in range(5):
        sender.publish(version(step), filled(step), retain=step == 1)
    begin.set()
    sender.wait()
    assert ShmReceiver(sender.address).available() == [version(1), version(3), version(4)]
    sender.close()


def test_the_head_follows_a_new_lineage_with_a_smaller_step(tmp_path: Path) -> None:
    first = publisher(tmp_path)
    first.publish(version(9), filled(9))
    second = publisher(tmp_path)  # the learner died and came back without closing
    receiver = ShmReceiver(second.address)
    second.publish(version(5, lineage=2), filled(5))
    assert receiver.head() == version(5, lineage=2)
    assert receiver.available() == [version(9), version(5, lineage=2)]
    second.publish(version(6, lineage=2), filled(6))
    assert receiver.available() == [version(5, lineage=2), version(6, lineage=2)]
    second.close()


def test_a_reader_racing_with_a_fast_publisher_sees_whole_versions(tmp_path: Path) -> None:
    sender = publisher(tmp_path, background=True)
    receiver = ShmReceiver(sender.address)
    stop = threading.Event()

    def publish() -> None:
        step = 0
        while not stop.is_set():
            sender.publish(version(step), filled(step, size=200_000))
            step += 1

    thread = threading.Thread(target=publish)
    thread.start()
    seen: set[int] = set()
    deadline = time.monotonic() + DEADLINE_S
    try:
        while len(seen) < 20 and time.monotonic() < deadline:
            head = receiver.head()
            if head is None:
                continue
            try:
                tensors = receiver.fetch(head)
            except WeightsGone:
                continue
            assert all(bool((tensor == head.step).all()) for tensor in tensors.values())
            seen.add(head.step)
    finally:
        stop.set()
        thread.join()
        sender.close()
    assert len(seen) >= 20


def test_the_head_never_names_a_version_that_cannot_be_fetched(tmp_path: Path) -> None:
    sender = publisher(tmp_path, keep=1)
    check_heads(sender, ShmReceiver(sender.address))
    sender.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    sender = publisher(tmp_path)
    sender.publish(version(1), filled(1))
    sender.publish(version(2), filled(2))
    path = Path(sender.address) / "weights-1.1"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-100] ^= 1
    elif damage == "cut":
        content = content[:-200]
    elif damage == "empty":
        content.clear()
    else:
        content = bytearray((Path(sender.address) / "weights-1.2").read_bytes())
    path.write_bytes(content)
    with pytest.raises(WeightsCorrupt, match=r"weights-1\.1"):
        ShmReceiver(sender.address).fetch(version(1))
    sender.close()


def test_a_failing_disk_is_reported_to_the_learner(tmp_path: Path) -> None:
    sender = publisher(tmp_path, background=True)
    directory = Path(sender.address)
    directory.rename(tmp_path / "moved")
    with pytest.raises(OSError, match="cannot publish weights"):
        sender.publish(version(1), filled(1))
    sender.close()


def test_a_full_disk_is_told_to_the_learner_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    sender, told = publisher(tmp_path, background=False), list[str]()
    sender.heed(lambda: bool(told), told.append)  # stopped while it waits
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space"):
        sender.publish(version(1), filled(1))
    assert len(told) == 1 and sender.address in told[0]
    assert not list(Path(sender.address).glob(".staged-*"))
    assert len(os.listdir("/proc/self/fd")) == opened
    sender.close()


def test_any_failure_of_the_thread_is_reported_to_the_learner(tmp_path: Path) -> None:
    sender = publisher(tmp_path, background=True)
    (Path(sender.address) / "weights-1.1").mkdir()  # the file cannot get this name
    sender.publish(version(1), filled(1))
    with pytest.raises(OSError, match="cannot publish weights"):
        sender.wait()
    sender.close()


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="private"):
        publisher(tmp_path)


def test_a_directory_that_inherits_setgid_is_claimed_and_swept(tmp_path: Path) -> None:
    tmp_path.chmod(0o2700)
    directory = tmp_path / f"{PREFIX}shared"
    directory.mkdir(mode=0o700)
    if not directory.stat().st_mode & stat.S_ISGID:
        pytest.skip("this file system does not pass setgid on")
    claim(directory).release()
    assert (directory / OWNER).exists()
    sweep(tmp_path)
    assert not directory.exists()


def claimed_by_another(directory: Path, then: str) -> "subprocess.Popen[str]":
    """A process that claims `directory` and does `then`, once it has said so."""
    code = f"""
import sys
from pathlib import Path
from evolver_async.process.private_directories import claim
claim(Path(sys.argv[1]))
print(flush=True)
{then}
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


def aged(directory: Path) -> Path:
    os.utime(directory, (0, 0))
    return directory


@pytest.mark.process
def test_directories_of_dead_owners_are_swept_and_living_ones_stay(tmp_path: Path) -> None:
    dead, mine = tmp_path / f"{PREFIX}dead", tmp_path / f"{PREFIX}mine"
    claimed_by_another(dead, "").communicate()
    assert dead.stat().st_mode & 0o777 == 0o700 and (dead / OWNER).exists()
    claim(mine)
    young = tmp_path / f"{PREFIX}young"  # somebody is about to claim it
    young.mkdir(mode=0o700)
    sweep(tmp_path)
    assert mine.exists() and young.exists() and not dead.exists()


@pytest.mark.process
def test_an_owner_in_another_container_or_host_keeps_its_directory(tmp_path: Path) -> None:
    """Its process number is that of nobody here: only the lock tells that it lives."""
    directory = tmp_path / f"{PREFIX}far"
    process = claimed_by_another(directory, "sys.stdin.read()")
    owner = {"host": "elsewhere", "boot": "another", "pid": 2**22 + 1, "created": 0.0}
    (directory / OWNER).write_text(json.dumps(owner))
    sweep(tmp_path)
    assert directory.exists() and owned(directory)
    process.communicate("")
    assert not owned(directory)
    sweep(tmp_path)
    assert not directory.exists()


@pytest.mark.process
@pytest.mark.parametrize(
    ("host", "kind", "options", "stays"),
    [
        ("elsewhere", "nfs", "rw,vers=3,local_lock=all", True),
        ("elsewhere", "nfs4", "rw,vers=4.2,local_lock=none", False),
        ("elsewhere", "fuse.sshfs", "rw,user_id=0", True),
        ("elsewhere", "cifs", "rw,nobrl", True),
        (socket.gethostname(), "nfs", "rw,vers=3,local_lock=all", False),
    ],
)
def test_where_locks_are_of_one_host_the_directories_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, kind: str, options: str, stays: bool
) -> None:
    directory, device = tmp_path / f"{PREFIX}far", tmp_path.stat().st_dev
    claimed_by_another(directory, "").communicate()
    (directory / OWNER).write_text(json.dumps({"host": host, "boot": "another", "pid": 7}))
    table = tmp_path / "mounts"
    number = f"{os.major(device)}:{os.minor(device)}"
    table.write_text(f"1 1 {number} / / rw - {kind} server:/ {options}\n")
    monkeypatch.setattr(mounts, "MOUNTS", table)
    sweep(tmp_path)
    assert directory.exists() == stays


@pytest.mark.parametrize("content", ["", "[]", '{"pid": "x"}', "\0"])
def test_own_garbage_is_swept(tmp_path: Path, content: str) -> None:
    directory, empty = tmp_path / f"{PREFIX}garbage", tmp_path / f"{PREFIX}empty"
    for path in (directory, empty):
        path.mkdir(mode=0o700)
    (directory / OWNER).write_text(content)
    sweep(tmp_path)  # neither is old enough to be garbage
    assert directory.exists() and empty.exists()
    for path in (directory, empty):
        aged(path)
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_not_locked_while_somebody_may_be_about_to_claim_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / f"{PREFIX}young"
    directory.mkdir(mode=0o700)
    (directory / LOCK).touch()

    def flock(*_: object) -> None:
        pytest.fail("a claim at this moment would find the lock taken, and no owner")

    monkeypatch.setattr(fcntl, "flock", flock)
    sweep(tmp_path)
    assert directory.exists()


def test_directories_of_other_use_are_not_swept(tmp_path: Path) -> None:
    notes, public = tmp_path / f"{PREFIX}notes", tmp_path / f"{PREFIX}public"
    notes.mkdir(mode=0o700)
    (notes / "notes.txt").write_text("kept")
    public.mkdir(mode=0o755)
    for path in (notes, public):
        aged(path)
    sweep(tmp_path)
    assert (notes / "notes.txt").read_text() == "kept" and public.exists()


@pytest.mark.process
def test_a_directory_whose_lock_cannot_be_examined_is_left_alone_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / f"{PREFIX}nfs"
    claimed_by_another(directory, "").communicate()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    sweep(aged(directory).parent)
    assert directory.exists()
    assert f"{directory}: is not removed" in caplog.text and socket.gethostname() in caplog.text
    claim(tmp_path / "mine").remove()  # works, and says that nobody is kept out
    assert "cannot be locked" in caplog.text and not (tmp_path / "mine").exists()


def test_another_users_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / f"{PREFIX}theirs"
    aged(directory.parent)
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(PermissionError, match=f"{directory}: belongs to user "):
        claim(directory)
    sweep(aged(directory).parent)
    assert directory.exists()


def test_the_learner_works_in_the_directory_that_the_launcher_claimed(tmp_path: Path) -> None:
    claim(tmp_path / "w")
    owner = (tmp_path / "w" / OWNER).read_text()
    sender = publisher(tmp_path)
    assert (tmp_path / "w" / OWNER).read_text() == owner
    sender.close()
    again = publisher(tmp_path)
    assert (tmp_path / "w" / OWNER).read_text() == owner
    again.close()
