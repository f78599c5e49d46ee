"""Fault 28: whoever dies around the weights, nobody ever holds a mixture of two versions.

Whole versions under a racing publisher and damaged files are in `test_weights`; here processes die.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from invariants import check_leaks, check_named, traces
from launches import wait_for

from evolver_async.schema import WeightId
from evolver_async.weights.channel.base import WeightsCorrupt, WeightsGone
from evolver_async.weights.shm import ShmPublisher, ShmReceiver

NUMBERS = 1 << 20  # of one tensor, so that writing and reading it take a while
READER = """
import sys
from evolver_async.weights.channel.base import WeightsGone
from evolver_async.weights.shm import ShmReceiver
receiver = ShmReceiver(sys.argv[1])
print("ready", flush=True)
while True:
    head = receiver.head()
    try:
        if head is not None:
            receiver.fetch(head)
    except WeightsGone:
        pass
"""
WRITER = """
import sys, torch
from pathlib import Path
from evolver_async.schema import WeightId
from evolver_async.weights.shm import ShmPublisher
publisher = ShmPublisher(Path(sys.argv[1]), background=False)
print("ready", flush=True)
step = int(sys.argv[2])
while True:
    step += 1
    tensors = {name: torch.full((int(sys.argv[3]),), float(step)) for name in "abc"}
    publisher.publish(WeightId(lineage=1, step=step), tensors)
"""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = traces()
    yield
    check_leaks(before)


def filled(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((NUMBERS,), float(step)) for name in "abc"}


def version(step: int, lineage: int = 1) -> WeightId:
    return WeightId(lineage=lineage, step=step)


def running(program: str, *arguments: object) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def killed(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def whole(receiver: ShmReceiver) -> int | None:
    """The step of the head, all of whose numbers are of that step; None where it has just gone."""
    head = receiver.head()
    assert head is not None
    try:
        tensors = receiver.fetch(head)
    except WeightsGone:
        return None
    assert all(bool((tensor == head.step).all()) for tensor in tensors.values())
    return head.step


def test_28_a_reader_killed_while_it_fetches_disturbs_nobody(tmp_path: Path) -> None:
    publisher = ShmPublisher(tmp_path / "w", background=False)
    publisher.publish(version(0), filled(0))
    for step in range(1, 4):
        reader = running(READER, publisher.address)
        time.sleep(0.05 * step)
        killed(reader)
        publisher.publish(version(step), filled(step))
        assert whole(ShmReceiver(publisher.address)) == step, "so does one who joins late"
    publisher.close()


def test_28_a_publisher_killed_while_it_writes_leaves_a_whole_head(tmp_path: Path) -> None:
    directory, step = tmp_path / "w", 0
    for attempt in range(3):
        writer = running(WRITER, directory, step, NUMBERS)
        receiver = ShmReceiver(str(directory))
        wait_for(lambda receiver=receiver: receiver.head() is not None, "a first version")
        time.sleep(0.03 * (attempt + 1))
        killed(writer)
        found = whole(receiver)
        assert found is not None and found >= step
        step = found
    successor = ShmPublisher(directory, background=False)  # the next learner, resumed further back
    successor.publish(version(1, lineage=2), filled(1))
    receiver = ShmReceiver(str(directory))
    assert (receiver.head(), whole(receiver)) == (version(1, lineage=2), 1)
    successor.close()
    assert [path.name for path in directory.glob("weights-*")] == []


def test_28_damaged_weights_are_named_and_not_adopted(tmp_path: Path) -> None:
    publisher = ShmPublisher(tmp_path / "w", background=False)
    publisher.publish(version(7), filled(7))
    path = Path(publisher.address) / "weights-1.7"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsCorrupt) as damage:
        ShmReceiver(publisher.address).fetch(version(7))
    check_named(str(damage.value), "weights-1.7")
    publisher.publish(version(8), filled(8))
    assert whole(ShmReceiver(publisher.address)) == 8
    publisher.close()
