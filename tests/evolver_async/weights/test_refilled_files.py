"""Files of withdrawn versions are filled again, and no receiver ever sees its memory change."""

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evolver_async.process import mounts
from evolver_async.schema import WeightId
from evolver_async.weights import snapshot_file
from evolver_async.weights.channel.interface import WeightsGone
from evolver_async.weights.channel.mapping import in_memory, on_network
from evolver_async.weights.shm import ShmPublisher, ShmReceiver
from evolver_async.weights.snapshot_file import STAGED, read

HOLDER = """
import sys
from evolver_async.schema import WeightId
from evolver_async.weights.shm import ShmReceiver
tensors = ShmReceiver(sys.argv[1]).fetch(WeightId(lineage=1, step=int(sys.argv[2])))
tensors = {name: tensor for name, tensor in tensors.items() if name == "b"}  # one is enough
print("holds", flush=True)
sys.stdin.readline()
print(sorted(set(tensors["b"].flatten().tolist())), flush=True)
sys.stdin.readline()
"""


ON_NETWORK = """
import os, sys
from pathlib import Path
import torch
from evolver_async.schema import WeightId
from evolver_async.process import mounts
from evolver_async.weights.shm import ShmPublisher, ShmReceiver
directory = Path(sys.argv[1])
device = directory.stat().st_dev
mounts.MOUNTS = directory / "mounts"
mounts.MOUNTS.write_text(f"1 1 {os.major(device)}:{os.minor(device)} / / rw - nfs4 host:/ rw")
publisher, weights = ShmPublisher(directory / "w", background=False), WeightId(lineage=1, step=0)
publisher.publish(weights, {"a": torch.full((100_000,), 3.0)})
fetched = ShmReceiver(directory / "w").fetch(weights)
os.truncate(directory / "w" / f"weights-{weights}", 0)  # as the server, by another host
print(set(fetched["a"].tolist()))
"""


def version(step: int) -> WeightId:
    return WeightId(lineage=1, step=step)


def filled(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((100_000,), float(step)), "b": torch.full((3, 5), float(step))}


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in this host's shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-refilled-") as directory:
        yield Path(directory)


def inode(publisher: ShmPublisher, step: int) -> int:
    return (publisher.directory / f"weights-{version(step)}").stat().st_ino


@pytest.mark.parametrize("background", [False, True])
def test_a_file_that_nobody_has_mapped_is_filled_again(shared: Path, background: bool) -> None:
    publisher = ShmPublisher(shared / "w", keep=2, background=background)
    files = []
    for step in range(9):
        publisher.publish(version(step), filled(step))
        publisher.wait()
        files.append(inode(publisher, step))
        found = ShmReceiver(publisher.address).fetch(version(step))
        assert all(bool((one == step).all()) for one in found.values())
        del found
    assert len(set(files)) == 3, "two are kept, one is filled"
    assert {path.stat().st_mode & 0o777 for path in publisher.directory.glob("*weights*")} == {
        0o600
    }
    publisher.close()


@pytest.mark.process
def test_tensors_that_another_process_holds_never_change(shared: Path) -> None:
    publisher = ShmPublisher(shared / "w", keep=1, background=False)
    publisher.publish(version(0), filled(0))
    held = inode(publisher, 0)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, publisher.address, "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None and holder.stdout is not None
    assert holder.stdout.readline() == "holds\n"
    for step in range(1, 6):
        publisher.publish(version(step), filled(step))
        assert inode(publisher, step) != held
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "[0.0]\n"
    holder.kill()
    holder.communicate()
    publisher.close()


def test_memory_is_free_when_the_last_tensor_is_dropped(shared: Path) -> None:
    publisher = ShmPublisher(shared / "w", keep=1, background=False)
    publisher.publish(version(0), filled(0))
    receiver = ShmReceiver(publisher.address)
    parameter = torch.nn.Parameter(torch.zeros(3, 5))
    parameter.data = receiver.fetch(version(0))["b"]  # as an engine adopts it
    first = inode(publisher, 0)
    publisher.publish(version(1), filled(1))
    publisher.publish(version(2), filled(2))
    assert inode(publisher, 2) != first and bool((parameter == 0).all())
    second = inode(publisher, 2)
    parameter.data = receiver.fetch(version(2))["b"]
    publisher.publish(version(3), filled(3))
    parameter.data = receiver.fetch(version(3))["b"]
    publisher.publish(version(4), filled(4))
    assert inode(publisher, 4) == second and bool((parameter == 3).all())
    publisher.close()


def test_a_receiver_that_opened_a_file_before_it_was_filled_again_finds_its_version_gone(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = ShmPublisher(shared / "w", keep=1, background=False)
    publisher.publish(version(0), filled(0))
    opened = os.open

    def late(path: Path, *arguments: int) -> int:
        file = opened(path, *arguments)
        monkeypatch.setattr(os, "open", opened)
        for step in (1, 2):  # the second fills the file that was just opened
            publisher.publish(version(step), filled(step))
        return file

    path = shared / "w" / "weights-1.0"
    before = path.stat().st_ino
    monkeypatch.setattr(os, "open", late)
    with pytest.raises(WeightsGone):
        read(path, version(0), threads=1)
    assert inode(publisher, 2) == before, "it was filled again in between"
    publisher.close()


def test_a_receiver_can_change_only_its_own_view(shared: Path) -> None:
    publisher = ShmPublisher(shared / "w", background=False)
    publisher.publish(version(0), filled(0))
    receiver = ShmReceiver(publisher.address)
    receiver.fetch(version(0))["a"].fill_(7.0)
    assert bool((receiver.fetch(version(0))["a"] == 0).all())
    publisher.close()


def test_hidden_files_of_a_publisher_that_died_are_removed(shared: Path) -> None:
    first = ShmPublisher(shared / "w", keep=1, background=False)
    for step in range(3):
        first.publish(version(step), filled(step))
    assert list(first.directory.glob(f"{STAGED}*"))
    second = ShmPublisher(shared / "w", keep=1, background=False)  # the first never closed
    assert not list(second.directory.glob(f"{STAGED}*"))
    assert ShmReceiver(second.address).available() == [version(2)]
    second.close()
    assert not list((shared / "w").glob("weights*"))


def test_on_a_disk_a_file_is_never_filled_again(tmp_path: Path) -> None:
    assert in_memory(Path("/dev/shm"))
    publisher = ShmPublisher(tmp_path / "w", keep=1, background=False)
    publisher.publish(version(0), filled(0))
    held = ShmReceiver(publisher.address).fetch(version(0))
    for step in range(1, 4):
        publisher.publish(version(step), filled(step))
    assert bool((held["a"] == 0).all())
    publisher.close()


def test_a_head_that_another_host_replaces_while_it_is_read_is_read_again(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, text = ShmPublisher(shared / "w", background=False), Path.read_text
    publisher.publish(version(3), filled(3))
    failures = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))]

    def read_text(path: Path) -> str:
        if failures:
            raise failures.pop()
        return text(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert ShmReceiver(publisher.address).head() == version(3)
    publisher.close()


@pytest.mark.process
def test_a_file_that_another_host_removes_kills_no_reader(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ON_NETWORK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "{3.0}\n"), done.stderr


def test_files_are_copied_where_another_host_can_remove_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "mounts")
    with open(tmp_path / "file", "wb") as file:
        device = os.fstat(file.fileno()).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for kind in ("nfs4", "fuse.sshfs", "wekafs", "panfs", "ext4", "overlay"):
            mounts.MOUNTS.write_text(f"1 1 {number} / / rw - {kind} host:/ rw\n")
            assert on_network(file.fileno()) == (kind not in ("ext4", "overlay"))


def test_a_file_that_is_removed_while_it_is_read_is_gone(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = ShmPublisher(shared / "w", background=False)
    publisher.publish(version(0), filled(0))

    def stale(*_: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    receiver, files = ShmReceiver(publisher.address), len(os.listdir("/proc/self/fd"))
    for module, name in ((snapshot_file, "on_network"), (os, "preadv")):
        with monkeypatch.context() as removed:
            removed.setattr(snapshot_file, "on_network", lambda _: True)
            removed.setattr(module, name, stale)
            with pytest.raises(WeightsGone, match="were removed"):
                receiver.fetch(version(0))
        assert len(os.listdir("/proc/self/fd")) <= files
    with monkeypatch.context() as removed:
        removed.setattr(os, "listdir", stale)
        assert receiver.available() == []
    publisher.close()
