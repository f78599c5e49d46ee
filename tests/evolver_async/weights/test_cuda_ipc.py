"""The protocol of the channel on one GPU, with host memory in the GPU's place."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipc_memory
import pytest
from ipc_memory import Files, Loopback, check_killed, check_race, check_versions, version
from torch import Tensor
from weight_heads import check_heads

from evolver_async.process.private_directories import LOCK, OWNER, claim
from evolver_async.weights.channel.interface import WeightsGone
from evolver_async.weights.cuda_ipc import IpcPublisher, IpcReceiver

pytestmark = pytest.mark.process


@dataclass(frozen=True)
class Ended(Files):
    """The memory of a process that has ended."""

    def open(self, name: list[Any]) -> Tensor:
        raise RuntimeError("CUDA error: invalid resource handle")


def test_versions_are_kept_replaced_and_verified(tmp_path: Path) -> None:
    check_versions(tmp_path, Files())


def test_a_reader_racing_with_a_fast_publisher_sees_whole_versions(tmp_path: Path) -> None:
    check_race(tmp_path, Files(), "cpu", numbers=200_000, versions=300)


def test_the_head_never_names_a_version_that_cannot_be_fetched(tmp_path: Path) -> None:
    publisher = IpcPublisher(tmp_path / "w", Files())
    check_heads(publisher, IpcReceiver(publisher.address, Loopback(publisher)))
    publisher.close()


ONE_VERSION = """
import sys, time, torch
from ipc_memory import Files, version
from evolver_async.weights.cuda_ipc import IpcPublisher
IpcPublisher(sys.argv[1], Files()).publish(version(1), {"w": torch.zeros(3)})
print("published", flush=True)
time.sleep(600)
"""


def test_weights_of_a_learner_that_has_died_are_gone_while_its_launcher_lives(
    tmp_path: Path,
) -> None:
    launcher = claim(tmp_path / "w")
    command = [sys.executable, "-c", ONE_VERSION, str(tmp_path / "w")]
    here = Path(ipc_memory.__file__).parent
    learner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=here)
    try:
        assert learner.stdout is not None and learner.stdout.readline() == "published\n"
        receiver = IpcReceiver(tmp_path / "w", Ended())
        with pytest.raises(RuntimeError, match="invalid resource handle"):
            receiver.fetch(version(1))  # its learner lives: the next version would not help
    finally:
        learner.kill()
        learner.wait()
    with pytest.raises(WeightsGone, match=r"has died: .*invalid resource handle"):
        receiver.fetch(version(1))
    launcher.remove()
    assert not (tmp_path / "w").exists()


def test_a_publisher_can_end_while_its_predecessor_still_dies(tmp_path: Path) -> None:
    launcher = claim(tmp_path / "w")
    dying, publisher = (IpcPublisher(tmp_path / "w", Files()) for _ in range(2))
    publisher.close()
    assert {path.name for path in (tmp_path / "w").iterdir()} == {LOCK, OWNER}
    dying.close()
    launcher.remove()
    assert not (tmp_path / "w").exists()


def test_a_publisher_killed_while_it_is_read_leaves_whole_versions_or_none(tmp_path: Path) -> None:
    check_killed(tmp_path, Files(), "cpu", numbers=200_000, times=1)
