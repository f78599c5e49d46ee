"""Checkpoints: whole or not at all, the newest valid one, never a silent fresh start."""

import errno
import logging
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from evolver_async.checkpoint import checkpoints as checkpoint
from evolver_async.checkpoint import sync
from evolver_async.checkpoint.checkpoints import (
    MANIFEST,
    TEMPORARY,
    CheckpointError,
    exists,
    leave,
    load_newest,
    progress,
    save,
    valid,
)
from evolver_async.checkpoint.history import CheckpointEvaluation, note


def writer(content: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "model.bin").write_text(content)
        (directory / "deep" / "er").mkdir(parents=True)
        (directory / "deep" / "er" / "state.json").write_text("{}")

    return write


def save_steps(directory: Path, *steps: int, keep: int = 3, run_id: str = "run") -> None:
    for step in steps:
        save(directory, step, writer(f"at {step}"), run_id=run_id, keep=keep)


def test_the_newest_checkpoint_is_loaded_with_what_was_saved(tmp_path: Path) -> None:
    assert not exists(tmp_path / "c")
    save_steps(tmp_path / "c", 5, 10)
    assert exists(tmp_path / "c")
    path, manifest = load_newest(tmp_path / "c", "run")
    assert (path / "model.bin").read_text() == "at 10"
    assert (path / "deep/er/state.json").exists()
    assert (manifest.step, manifest.run_id) == (10, "run")
    assert set(manifest.files) == {"model.bin", "deep/er/state.json"}


def test_every_file_and_directory_of_a_checkpoint_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, synced = os.fsync, set[Path]()

    def watched(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    made = save(tmp_path / "c", 1, writer("1"), run_id="run", keep=1)
    written = tmp_path / "c" / f"{TEMPORARY}{made.name}"  # its name until all of it is on disk
    content = {written / path.relative_to(made) for path in made.rglob("*")}
    assert synced == {tmp_path, tmp_path / "c", written, *content}


def test_a_checkpoint_that_is_being_written_shows_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "CHUNK_BYTES", 4 * mmap.PAGESIZE)
    monkeypatch.setattr(checkpoint, "READ_BYTES", 4 * mmap.PAGESIZE)
    content = os.urandom(9 * mmap.PAGESIZE + 1)
    seen: list[tuple[int, int] | None] = []

    def write(directory: Path) -> None:
        seen.append(progress(tmp_path))
        (directory / "model.bin").write_bytes(content)
        seen.append(progress(tmp_path))

    utime = os.utime

    def watched(path: Path) -> None:
        utime(path, ns=(len(seen), len(seen) + 2**62))  # in the order of the calls
        seen.append(progress(tmp_path))

    monkeypatch.setattr(os, "utime", watched)
    assert progress(tmp_path) is None
    path = save(tmp_path, 1, write, run_id="run", keep=2)
    assert progress(tmp_path) is None
    assert len(seen) >= 2 + 3 + 3, "three chunks were hashed and synced"
    assert len(set(seen)) == len(seen) and None not in seen
    assert (path / "model.bin").read_bytes() == content
    assert load_newest(tmp_path, "run")[0] == path


def test_progress_shows_after_the_clock_was_set_back(tmp_path: Path) -> None:
    temporary = tmp_path / f"{checkpoint.TEMPORARY}a"
    temporary.mkdir()
    (temporary / "model.bin").write_text("written before")
    os.utime(temporary, ns=(0, 10**9))
    before = progress(tmp_path)
    os.utime(temporary, ns=(0, 2 * 10**9))
    assert progress(tmp_path) != before


def test_progress_survives_the_renaming_of_what_it_reads(tmp_path: Path) -> None:
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            temporary, final = tmp_path / f"{checkpoint.TEMPORARY}a", tmp_path / "a"
            (temporary / "deep").mkdir(parents=True)
            temporary.rename(final)
            shutil.rmtree(final)

    calls, seen = 0, set[bool]()
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write)
        try:
            while calls < 3000 or len(seen) < 2:  # met both while it was written and without
                calls += 1
                seen.add(progress(tmp_path) is None)
        finally:
            ended.set()
        written.result()


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert [manifest.step for _, manifest in valid(tmp_path)] == [3, 4]


def test_the_same_or_a_smaller_step_after_a_resume_is_newer(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, keep=3)
    save(tmp_path, 10, writer("trained again"), run_id="run", keep=3)
    assert load_newest(tmp_path, "run")[1].step == 10
    assert [manifest.step for _, manifest in valid(tmp_path)] == [10, 20, 10]


def test_copies_take_no_place_of_those_that_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, keep=2)
    (valid(tmp_path)[-1][0] / "note.json").write_text("good")
    save_steps(tmp_path, 3, 3, keep=2)  # a later start, and its end
    found = valid(tmp_path)
    assert [manifest.step for _, manifest in found] == [2, 3]
    assert (found[-1][0] / "note.json").read_text() == "good"
    save_steps(tmp_path, 4, keep=2)
    assert [manifest.step for _, manifest in valid(tmp_path)] == [3, 4]


def test_one_that_cannot_be_deleted_costs_room_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS keeps the files that a process of this host reads in their directory, under new names."""
    save_steps(tmp_path, 1, 2, keep=2)
    read = tmp_path / f"{checkpoint.DELETED}{valid(tmp_path)[0][0].name}"
    rmtree = shutil.rmtree

    def rmtree_of_nfs(path: Path, **options: bool) -> None:
        if path == read:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree_of_nfs)
    save_steps(tmp_path, 3, keep=2)
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path}/") and said.endswith("Directory not empty")
    assert [manifest.step for _, manifest in valid(tmp_path)] == [2, 3], (
        "what is left of it is none"
    )
    monkeypatch.undo()
    save_steps(tmp_path, 4, keep=2)
    assert not read.exists()


def test_a_killed_deletion_leaves_nothing_that_is_listed_and_the_next_sweeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Died(BaseException):
        pass

    def killed(path: Path, **options: bool) -> None:
        raise Died

    save_steps(tmp_path, 1, 2, keep=2)
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Died):
        save_steps(tmp_path, 3, keep=2)
    monkeypatch.undo()
    assert [manifest.step for _, manifest in valid(tmp_path)] == [2, 3]
    assert load_newest(tmp_path, "run")[1].step == 3
    assert not caplog.records, "nobody has to know"
    assert progress(tmp_path) is None, "nothing is being written"
    save_steps(tmp_path, 4, keep=2)
    assert sorted(one.name.partition("-step-")[2] for one in tmp_path.iterdir()) == ["3", "4"]


def flatten(path: Path) -> None:
    """A file where a directory was."""
    shutil.rmtree(path / "deep")
    (path / "deep").write_text("")


def flip(path: Path) -> None:
    content = bytearray((path / "model.bin").read_bytes())
    content[0] ^= 1
    (path / "model.bin").write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "damaged": flip,
    "torn": lambda path: (path / "model.bin").write_text("at"),
    "missing": lambda path: (path / "model.bin").unlink(),
    "Not a directory": flatten,
    "has no manifest.json": lambda path: (path / MANIFEST).unlink(),
    "unreadable": lambda path: (path / MANIFEST).write_text("{"),
    "has format 1": lambda path: (path / MANIFEST).write_text(
        (path / MANIFEST).read_text().replace('"format": 2', '"format": 1')
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_aloud(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2)
    newest, _ = load_newest(tmp_path, "run")
    DAMAGES[damage](newest)
    with caplog.at_level(logging.WARNING):
        path, manifest = load_newest(tmp_path, "run")
    assert manifest.step == 1
    assert damage in caplog.text and path.name in caplog.text
    DAMAGES[damage](path)
    with pytest.raises(CheckpointError, match=f"no valid checkpoint: .*{damage}"):
        load_newest(tmp_path, "run")


def test_one_that_is_taken_away_while_it_is_read_is_passed_over_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a writer does that keeps only so many, while somebody else compares hashes."""
    save_steps(tmp_path, 1, 2)
    newest, _ = load_newest(tmp_path, "run")
    describe = checkpoint._describe

    def describe_late(path: Path) -> checkpoint.File:
        if path.is_relative_to(newest):
            shutil.rmtree(newest, ignore_errors=True)
        return describe(path)

    monkeypatch.setattr(checkpoint, "_describe", describe_late)
    with caplog.at_level(logging.WARNING):
        assert load_newest(tmp_path, "run")[1].step == 1
    assert "cannot be read (No such file or directory)" in caplog.text
    assert f"{newest}: " in caplog.text


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    (load_newest(tmp_path, "run")[0] / "model.bin").unlink()
    save_steps(tmp_path, 4, keep=2)
    assert [manifest.step for _, manifest in valid(tmp_path)] == [2, 4]


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    save_steps(tmp_path, 2, run_id="other")
    with pytest.raises(CheckpointError, match="belongs to run other, not to run"):
        load_newest(tmp_path, "run")


@pytest.mark.parametrize(
    "name",
    ["../model.bin", "deep/../../x", "{outside}", ".", "", "deep//er", "./model.bin", "a\0b"],
)
def test_a_manifest_names_files_of_its_checkpoint_alone(tmp_path: Path, name: str) -> None:
    save_steps(tmp_path / "c", 1)
    outside = tmp_path / "outside"
    outside.write_text("a user's own")
    path, manifest = load_newest(tmp_path / "c", "run")
    files = {**manifest.files, name.format(outside=outside): manifest.files["model.bin"]}
    changed = msgspec.structs.replace(manifest, files=files)
    (path / MANIFEST).write_bytes(msgspec.json.encode(changed))
    with pytest.raises(CheckpointError, match="names a file outside"):
        load_newest(tmp_path / "c", "run")
    assert valid(tmp_path / "c") == []


def test_a_checkpoint_behind_a_link_is_read_and_neither_written_to_nor_deleted(
    tmp_path: Path,
) -> None:
    save_steps(tmp_path / "c", 1, 2)
    second = valid(tmp_path / "c")[-1][0]
    kept = tmp_path / "elsewhere"
    second.rename(kept)
    second.symlink_to(kept)
    before = {path: path.stat().st_mtime_ns for path in (kept, *kept.rglob("*"))}
    assert load_newest(tmp_path / "c", "run")[1].step == 2
    (tmp_path / "c" / f"{TEMPORARY}x").symlink_to(kept)  # of a writer that died
    note(second, CheckpointEvaluation(success=1.0, episodes=8, digest="a"))
    again = save(tmp_path / "c", 2, writer("at 2"), run_id="run", keep=1)  # the link is a copy
    assert [path for path, _ in valid(tmp_path / "c")] == [again] and not second.is_symlink()
    (tmp_path / "c" / "000007-step-7").symlink_to(kept)
    save_steps(tmp_path / "c", 8)
    assert (tmp_path / "c" / "000007-step-7").is_symlink()
    leave(tmp_path / "c", again, valid(tmp_path / "c")[-1][0])
    assert not (tmp_path / "c" / "000007-step-7").is_symlink()
    assert {path: path.stat().st_mtime_ns for path in (kept, *kept.rglob("*"))} == before


def test_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_newest(tmp_path / "c", "run")


def test_a_writer_that_fails_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)

    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        save(tmp_path, 2, fail, run_id="run", keep=2)
    assert not list(tmp_path.glob(".tmp-*"))  # its room is free again
    assert load_newest(tmp_path, "run")[1].step == 1
    save_steps(tmp_path, 3)
    assert [manifest.step for _, manifest in valid(tmp_path)] == [1, 3]


@pytest.mark.process
def test_a_kill_at_any_moment_leaves_a_valid_newest(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from evolver_async.checkpoint.checkpoints import save
step = 0
while True:
    step += 1
    save(Path(sys.argv[1]), step, lambda d: (d / "m").write_text(str(step) * 10000),
         run_id="run", keep=2)
    print(step, flush=True)
"""
    confirmed = 0
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(5):
            confirmed = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        path, manifest = load_newest(tmp_path, "run")
        assert manifest.step >= confirmed
        assert (path / "m").read_text() == str(manifest.step) * 10000
