"""Fault 4, and 5 and 6 for checkpoints: kills, power cuts and flipped bits never lose the newest.

A forked child saves a checkpoint and kills itself before its n-th call that changes the disk, for
every n until it gets through.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from power import cut_at_every_sync

from evolver_async.checkpoint import checkpoints as checkpoint
from evolver_async.checkpoint import history
from evolver_async.checkpoint.checkpoints import load_newest, save
from evolver_async.config.load import load
from learner.run.checkpoint import Checkpoints

CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")  # audit events
PARTS = 3


def content(step: int) -> bytes:
    return b"step %d " % step * 1000


def write(directory: Path, step: int) -> None:
    (directory / "deep").mkdir()
    for path in (directory / "model", directory / "deep" / "state"):
        with open(path, "wb", buffering=0) as file:
            for part in range(PARTS):
                sys.audit("write")
                file.write(content(step)[part::PARTS])


def save_step(directory: Path, step: int) -> None:
    save(directory, step, lambda path: write(path, step), run_id="run", keep=2)


def check(directory: Path, *steps: int) -> int:
    """The newest one that loads is one of these, and whole."""
    path, manifest = load_newest(directory, "run")
    assert manifest.step in steps
    expected = b"".join(content(manifest.step)[part::PARTS] for part in range(PARTS))
    for name in ("model", "deep/state"):
        assert (path / name).read_bytes() == expected
    return manifest.step


def until_call(last: int, work: Callable[[], object]) -> None:
    """Runs in a child: kills it before its call number `last`."""
    calls = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal calls
        reads = event == "open" and arguments[1] in ("r", "rb")
        if event in (*CHANGES, "write", "sync") and not reads:
            if calls == last:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1

    fsync = os.fsync

    def counted_fsync(descriptor: int) -> None:
        sys.audit("sync")
        fsync(descriptor)

    checkpoint.os.fsync = counted_fsync  # pyright: ignore[reportPrivateImportUsage]
    sys.addaudithook(count)
    work()


def killed_before(last: int, work: Callable[[], object]) -> bool:
    """Do the work in a child; True if it came to its call number `last`."""
    child = multiprocessing.get_context("fork").Process(target=until_call, args=(last, work))
    child.start()
    child.join(30)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def test_04_a_kill_at_every_write_sync_and_rename_leaves_a_newest_that_loads(tmp_path: Path):
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    newest, step, last, killed = 2, 2, 0, True
    while killed:
        step += 1
        killed = killed_before(last, partial(save_step, tmp_path, step))
        newest = check(tmp_path, newest, step)
        assert len(checkpoint.valid(tmp_path)) >= 2, "falling back is possible at every moment"
        last += 1
    assert newest == step
    assert last > 25, f"only {last} calls were counted"


def test_04_a_kill_while_a_run_goes_back_leaves_it_where_it_was_or_has_gone(tmp_path: Path):
    """Of what lies between none counts: its steps are trained again, under the same numbers."""

    def fill(step: int, path: Path) -> None:
        (path / "model").write_bytes(content(step))
        (path / "state.json").write_text(json.dumps({"take": step}))

    settings, last, killed, ends = load(None, ["stages=[{kind: rl, steps: 9}]"]), 0, True, set()
    while killed:
        run = tmp_path / str(last) / "run"
        for step in range(1, 5):
            save(run / "checkpoints", step, partial(fill, step), run_id="run", keep=9)
        source = checkpoint.valid(run / "checkpoints")[1][0]
        killed = killed_before(
            last, partial(history.go_back, run / "checkpoints", source, lambda _: None)
        )
        Checkpoints(run, settings).newest()  # as the learner that is started next
        found = checkpoint.resumable(run / "checkpoints")
        ends.add(tuple(manifest.step for _, manifest in found))
        last += 1
    assert ends == {(1, 2, 3, 4), (1, 2, 2)} and last > 15


def test_05_a_power_cut_at_every_sync_leaves_a_newest_that_loads(tmp_path: Path):
    directory = tmp_path / "checkpoints"
    told = tmp_path.parent / f"{tmp_path.name}-told"
    save_step(directory, 1)

    def work() -> None:
        save_step(directory, 2)
        told.touch()  # not below what loses its power

    def check_newest() -> None:
        newest = check(directory, 1, 2)
        assert newest == 2 or not told.exists()

    assert cut_at_every_sync(tmp_path, work, check_newest) >= 6
    assert told.exists()


def test_06_a_flipped_bit_in_any_file_of_a_checkpoint_goes_back_to_the_one_before(tmp_path: Path):
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    newest, _ = load_newest(tmp_path, "run")
    for name in ("model", "deep/state"):
        data = bytearray((newest / name).read_bytes())
        data[len(data) // 3] ^= 16
        (newest / name).write_bytes(data)
        assert check(tmp_path, 1)
        data[len(data) // 3] ^= 16
        (newest / name).write_bytes(data)
    assert check(tmp_path, 2)
