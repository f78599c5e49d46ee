"""A disk that is full for a while: every writer but the journal, which `test_disk` has."""

import errno
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from evolver_async import room
from evolver_async.checkpoint import checkpoints as checkpoint
from evolver_async.config import Config
from evolver_async.errors import DISK_FULL
from evolver_async.launch import supervisor
from evolver_async.launch.child import Child, FailedStart, LocalSpawner
from evolver_async.metrics import first_reply
from evolver_async.metrics.writer import JsonlWriter
from evolver_async.process.setup import LogFile, RoleArgs, run_process
from evolver_async.room import await_room, lacks_room
from evolver_async.schema import WeightId
from evolver_async.weights.shm import ShmPublisher, ShmReceiver


def full(*_: object) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def a_full_device() -> Iterator[Path]:
    """The device every write to which fails so."""
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("needs /dev/full")
    yield path


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (full(), True),
        (OSError(errno.EDQUOT, "quota"), True),
        (SafetensorError("I/O error: No space left on device (os error 28)"), True),
        (ValueError("another"), False),
        (OSError(errno.EIO, "input/output error"), False),
    ],
)
def test_a_lack_of_room_is_known_however_it_is_raised(error: Exception, lacks: bool) -> None:
    assert lacks_room(error) == lacks
    wrapped = OSError("cannot publish")
    wrapped.__cause__ = error
    assert lacks_room(wrapped) == lacks


def test_work_waits_for_room_and_a_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RETRY_S", 0.0)
    tries, told = iter([full(), full(), None]), list[str]()

    def work() -> int:
        if (error := next(tries)) is not None:
            raise error
        return 7

    assert await_room(work, "a checkpoint", tell=told.append) == 7
    assert [bool(text) for text in told] == [True, False]
    tries = iter([full()])
    with pytest.raises(OSError, match="No space"):
        await_room(work, "a checkpoint", stops=lambda: True)


def test_rows_wait_for_room_and_none_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 0})

    class Disk:
        """The file, which takes half a row and then is full."""

        name, takes = "metrics.jsonl", [5]

        def write(self, data: bytes) -> int:
            if not self.takes:
                raise full()
            return file.write(data[: self.takes.pop()])

    file = writer.file
    with monkeypatch.context() as patched:
        patched.setattr(writer, "file", Disk())
        writer.write({"step": 1})
        writer.write({"step": 2})
    assert "No space left" in caplog.text
    writer.write({"step": 3})
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3] and writer.count == 4


def test_a_version_of_the_weights_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "RETRY_S", 0.0)
    refused, allocate = [0], os.posix_fallocate

    def scarce(*arguments: int) -> None:
        refused[0] += 1
        if refused[0] < 4:
            raise full()
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", scarce)
    publisher, told = ShmPublisher(tmp_path / "w", background=False), list[str]()
    publisher.heed(lambda: False, told.append)
    tensors = {"a": torch.ones(3)}
    publisher.publish(WeightId(lineage=1, step=1), tensors)
    assert [bool(text) for text in told] == [True, False]
    receiver = ShmReceiver(tmp_path / "w")
    assert receiver.fetch(WeightId(lineage=1, step=1))["a"].tolist() == [1, 1, 1]
    publisher.close()


def test_a_stopped_learner_waits_for_no_room_and_the_publisher_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = ShmPublisher(tmp_path / "w", background=False)
    publisher.heed(lambda: True, lambda _: None)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(full()))
        with pytest.raises(OSError, match="No space"):
            publisher.publish(WeightId(lineage=1, step=1), {"a": torch.ones(3)})
    publisher.publish(WeightId(lineage=1, step=1), {"a": torch.ones(3)})
    publisher.close()


def test_a_checkpoint_on_a_full_disk_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "RETRY_S", 0.0)
    tries = iter([True, True, False])

    def fill(path: Path) -> None:
        np.save(path / "a.npy", np.ones(3))
        if next(tries):
            raise full()

    await_room(
        lambda: checkpoint.save(tmp_path / "c", 3, fill, run_id="run", keep=2), "a checkpoint"
    )
    assert [manifest.step for _, manifest in checkpoint.valid(tmp_path / "c")] == [3]
    assert len(list((tmp_path / "c").iterdir())) == 1


def test_a_process_without_room_spends_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(_: RoleArgs) -> int:
        raise full()

    monkeypatch.setattr("evolver_async.process.setup.set_up_logging", lambda *_: None)
    args = RoleArgs(address="", name="actor-0", incarnation=0, run_dir=tmp_path)
    assert run_process("actor", lambda: main, args, None) == DISK_FULL
    config = Config()
    spawner = LocalSpawner(config, tmp_path, "ipc:///none", None)
    launcher = supervisor.Supervisor(config, tmp_path, spawner)
    child = Child("actor", "actor-0", FailedStart(DISK_FULL), 0)
    for _ in range(2 * config.launch.restarts):
        child.due = None
        launcher.supervise(child, time.monotonic())
        assert child.due is not None and child.restarts == 0


def test_the_launcher_says_that_a_disk_is_full_and_that_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config()
    launcher = supervisor.Supervisor(
        config, tmp_path, LocalSpawner(config, tmp_path, "ipc:///none", None)
    )
    monkeypatch.setattr(supervisor, "is_full", lambda path: path == tmp_path)
    for second in range(20):
        launcher.check_room(100.0 + second)
    assert caplog.text.count(str(tmp_path)) == 1 and "/dev/shm" not in caplog.text
    monkeypatch.setattr(supervisor, "is_full", lambda path: False)
    launcher.check_room(130.0)
    assert "space again" in caplog.text


def test_a_log_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with a_full_device() as device:
        handler = LogFile(device)
        for number in range(5):
            handler.handle(logging.LogRecord("one", logging.INFO, "", 1, "%d", (number,), None))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said


def test_the_first_reply_costs_no_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise full()

    with monkeypatch.context() as patched:
        patched.setattr(first_reply, "write_whole", refuse)
        first_reply.keep(tmp_path, "a reply")
    first_reply.keep(tmp_path, "a reply")
    assert first_reply.read(tmp_path) == "a reply"
