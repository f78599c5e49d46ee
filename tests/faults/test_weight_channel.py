"""Fault 28: whoever dies around the weights, nobody ever holds a mixture of two versions.

    KILL_SEEDS=4 make faults ARGS=-kweight_channel    24 kills in broadcasts

Whole versions under a racing publisher and damaged files are in `test_weights`; here processes die.
In the last test the receivers are workers of two engines, as in vLLM's processes, which
`tests/vllm/test_vllm_weights.py` kills themselves.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from invariants import check_leaks, check_named, traces
from launches import fair_time, wait_for

from actors.weights.vllm_channel import WorkerStates
from evolver_async.schema import WeightId
from evolver_async.weights.channel.interface import WeightsCorrupt, WeightsGone
from evolver_async.weights.collective.sender import ROLL_S
from evolver_async.weights.shm import ShmPublisher, ShmReceiver

NUMBERS = 1 << 20  # of one tensor, so that writing and reading it take a while
READER = """
import sys
from evolver_async.weights.channel.interface import WeightsGone
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
LEARNER = """
import sys, time, torch
from evolver_async.schema import WeightId
from evolver_async.weights.collective.channel import CollectivePublisher
torch.set_num_threads(1)
address, lineage, numbers, deadline_s = sys.argv[1:]
publisher = CollectivePublisher(address, deadline_s=float(deadline_s), bucket_bytes=1 << 18)
print("ready", flush=True)
for line in sys.stdin:
    tensors = {name: torch.full((int(numbers),), float(line)) for name in "abc"}
    publisher.publish(WeightId(lineage=int(lineage), step=int(line)), tensors)
    print("sending", flush=True)
    publisher.wait()
    print("sent", flush=True)
"""
WORKER = """
import sys, torch
from actors.weights.vllm_channel import StagingThread, WorkerChannel
from evolver_async.weights.ends import ReceiverSettings
torch.set_num_threads(1)
address, states, rank, deadline_s = sys.argv[1:]

def whole(tensors):
    values = {float(value) for tensor in tensors.values() for value in (tensor.min(), tensor.max())}
    assert len(values) == 1, f"mixed weights: {values}"
    return int(values.pop())

channel = WorkerChannel(ReceiverSettings("collective", address, float(deadline_s)), states, states)
worker = StagingThread(channel, int(rank), "cpu", whole)
print("ready", flush=True)
for line in sys.stdin:
    command, number, *weights = line.split()
    if command == "stage":
        worker.stage(int(number), *weights)
    else:
        print(worker.take(int(number)), flush=True)
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


DEADLINE_S = 5.0
KILLS = 6  # of each test: the first seed draws two of every kind
Process = subprocess.Popen


class Piped:
    """A process that is told things line by line, and answers."""

    def __init__(self, program: str, *arguments: object) -> None:
        command, pipe = [sys.executable, "-c", program, *map(str, arguments)], subprocess.PIPE
        self.process = Process(command, stdin=pipe, stdout=pipe, text=True)

    def ready(self) -> "Piped":
        """Wait for the end of its start."""
        assert self.answer() == "ready"
        return self

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """The next line, "" of a process that has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class WorkedEngine:
    """An actor's view of two workers, all of whose processes can be replaced."""

    def __init__(self, directory: Path, address: str) -> None:
        self.directory, self.address = directory, address
        self.requests = 0
        self.begin()

    def begin(self) -> None:
        self.requests += 1
        directory = self.directory / f"workers-{self.requests}"
        directory.mkdir(parents=True)
        self.states = WorkerStates(directory, 2)
        self.workers = [
            Piped(WORKER, self.address, directory, rank, DEADLINE_S) for rank in range(2)
        ]
        for worker in self.workers:
            worker.ready()

    def adopted(self) -> WeightId | None:
        """Stage and take the newest weights; None if they are gone again."""
        head = self.states.head()
        if head is None:
            return None
        self.requests += 1
        for worker in self.workers:
            worker.tell(f"stage {self.requests} {head}")
        try:
            wait_for(lambda: self.states.staged(self.requests), "the workers to stage")
        except WeightsGone:
            return None
        for worker in self.workers:
            worker.tell(f"take {self.requests}")
        assert {worker.answer() for worker in self.workers} == {str(head.step)}
        return head

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()


@pytest.mark.parametrize("seed", range(int(os.environ.get("KILL_SEEDS", "1"))))
@pytest.mark.time_limit(1200)
def test_28_engines_and_learners_killed_in_broadcasts_hold_no_mixture_and_come_back(
    tmp_path: Path, seed: int
) -> None:
    """Kill a worker, a whole engine (with its actor) or the learner while a version travels."""
    draws, address = random.Random(seed), str(tmp_path / "w")
    learner = Piped(LEARNER, address, 1, NUMBERS, DEADLINE_S).ready()
    engines = [WorkedEngine(tmp_path / name, address) for name in ("actor-0", "actor-1")]
    lineage, step = 1, 0

    def publish() -> None:
        learner.tell(f"{step}")
        assert learner.answer() == "sending"

    def all_hold(weights: WeightId) -> None:
        for engine in engines:
            wait_for(lambda engine=engine: engine.adopted() == weights, f"weights {weights}")

    try:
        publish()
        assert learner.answer() == "sent"
        all_hold(version(0))
        for _ in range(KILLS):
            step += 1
            victim, hurt = draws.choice(("worker", "engine", "learner")), draws.choice(engines)
            began = fair_time()
            publish()
            time.sleep(draws.uniform(0.0, 0.05))
            if victim == "learner":
                learner.kill()
                lineage, step = lineage + 1, step - 1  # it resumes further back
                learner = Piped(LEARNER, address, lineage, NUMBERS, DEADLINE_S).ready()
                publish()
                assert learner.answer() == "sent"
            else:
                for worker in hurt.workers if victim == "engine" else hurt.workers[:1]:
                    worker.kill()
                assert learner.answer() == "sent"
                assert fair_time() - began < DEADLINE_S + ROLL_S + 2
                began, step = fair_time(), step + 1
                publish()
                assert learner.answer() == "sent"
                assert fair_time() - began < DEADLINE_S + 5, "the next step"
                hurt.end()  # vLLM's processes end together, and are started anew
                hurt.begin()
            all_hold(version(step, lineage))
    finally:
        learner.kill()
        for engine in engines:
            engine.end()
