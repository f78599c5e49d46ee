"""Workers receive and stage weights by themselves; their actor adopts only what all of them hold.

The workers here are threads of this process, with vLLM left out: `tests/vllm` has both.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from launches import wait_for
from torch import Tensor

from actors.weights import vllm_channel
from actors.weights.vllm_channel import StagingThread, WorkerChannel, WorkerStates
from evolver_async.model.policy import ModelError
from evolver_async.schema import WeightId
from evolver_async.weights.channel.interface import Publisher, WeightsCorrupt, WeightsGone
from evolver_async.weights.collective.channel import CollectivePublisher
from evolver_async.weights.ends import ReceiverSettings
from evolver_async.weights.probe import Probe, add
from evolver_async.weights.shm import ShmPublisher

PROBE = Probe([1, 2, 3], [-1.0, -2.0])


def version(step: int, lineage: int = 1) -> WeightId:
    return WeightId(lineage=lineage, step=step)


def filled(step: int) -> dict[str, Tensor]:
    return add({name: torch.full((1000,), float(step)) for name in "abc"}, PROBE)


def prepared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if tensors.keys() != set("abc"):
        raise ModelError("weight of another model")
    return tensors


@pytest.fixture(params=["shm", "collective"])
def publisher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Publisher]:
    address = str(tmp_path / "w")
    if request.param == "shm":
        made = ShmPublisher(address, background=False)
    else:
        made = CollectivePublisher(address, deadline_s=5.0)
    yield made
    made.close()


@pytest.fixture
def start(publisher: Publisher, tmp_path: Path) -> Iterator[Callable[[int], StagingThread]]:
    (tmp_path / "states").mkdir()
    kind = "shm" if isinstance(publisher, ShmPublisher) else "collective"
    settings = ReceiverSettings(kind, publisher.address, deadline_s=5.0)
    channel = WorkerChannel(settings, str(tmp_path / "states"), "actor-0")
    started: list[StagingThread] = []

    def one(rank: int) -> StagingThread:
        started.append(StagingThread(channel, rank, "cpu", prepared))
        return started[-1]

    yield one
    for worker in started:
        worker.close()


def test_an_actor_sees_what_all_its_workers_hold(
    publisher: Publisher, start: Callable[[int], StagingThread], tmp_path: Path
) -> None:
    states = WorkerStates(tmp_path / "states", 2)
    publisher.publish(version(1), filled(1))
    start(0)
    one = WorkerStates(tmp_path / "states", 1)
    wait_for(lambda: one.head() == version(1), "the first worker's word")
    assert (states.head(), states.available()) == (None, []), "the second has said nothing"
    start(1)
    wait_for(lambda: states.head() == version(1), "the second worker's")
    for step in (2, 3):
        publisher.publish(version(step), filled(step), retain=step == 2)
    wait_for(lambda: states.available() == [version(2), version(3)], "the newest two")
    publisher.publish(version(1, lineage=2), filled(1))
    wait_for(lambda: states.head() == version(1, lineage=2), "the next learner's head")
    assert version(2) in states.available(), "an evaluation still needs it"


def test_a_staged_version_is_whole_verified_and_comes_with_its_probe(
    publisher: Publisher, start: Callable[[int], StagingThread], tmp_path: Path
) -> None:
    states, workers = WorkerStates(tmp_path / "states", 2), [start(0), start(1)]
    for step in (1, 2):
        publisher.publish(version(step), filled(step))
    wait_for(lambda: states.available() == [version(1), version(2)], "both versions")
    workers[0].stage(1, "1.1")
    assert states.staged(1) is None, "one of two is not enough"
    workers[1].stage(1, "1.1")
    wait_for(lambda: states.staged(1) is not None, "the second worker")
    found = states.staged(1)
    assert found is not None and found.probe == PROBE
    for worker in workers:
        tensors = worker.take(1)
        assert all(bool((tensor == 1.0).all()) for tensor in tensors.values())
    for worker in workers:
        worker.stage(2, "1.2")
    wait_for(lambda: states.staged(2) is not None, "the next")
    with pytest.raises(KeyError):
        workers[0].take(1)


def test_a_state_whose_writing_failed_is_written_again(
    publisher: Publisher,
    start: Callable[[int], StagingThread],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a full disk: no later version comes while the actor waits for this one."""
    monkeypatch.setattr(vllm_channel, "REFRESH_S", 0.01)
    states, part = WorkerStates(tmp_path / "states", 1), tmp_path / "states" / ".0"
    part.mkdir()
    publisher.publish(version(1), filled(1))
    start(0)
    wait_for(lambda: "IsADirectoryError" in caplog.text, "a failure")
    part.rmdir()
    wait_for(lambda: states.head() == version(1), "the version")


def test_what_cannot_be_staged_is_an_error_of_its_own_kind(
    publisher: Publisher, start: Callable[[int], StagingThread], tmp_path: Path
) -> None:
    states, worker = WorkerStates(tmp_path / "states", 1), start(0)
    publisher.publish(version(1), filled(1))
    wait_for(lambda: states.head() == version(1), "the version")

    def fails(request: int, weights: str, kind: type[Exception], match: str) -> None:
        worker.stage(request, weights)
        with pytest.raises(kind, match=match):
            wait_for(lambda: states.staged(request) is not None, "an answer")

    fails(1, "1.7", WeightsGone, r"1\.7")
    publisher.publish(version(2), {"other": torch.zeros(3)})
    wait_for(lambda: states.head() == version(2), "weights of another model")
    fails(2, "1.2", ModelError, "another model")
    if isinstance(publisher, ShmPublisher):
        publisher.publish(version(3), filled(3))
        path = Path(publisher.address) / "weights-1.3"
        content = bytearray(path.read_bytes())
        content[-2000] ^= 1
        path.write_bytes(content)
        fails(3, "1.3", WeightsCorrupt, r"weights-1\.3")
    publisher.publish(version(4), filled(4))
    wait_for(lambda: states.head() == version(4), "good ones again")
    worker.stage(4, "1.4")
    wait_for(lambda: states.staged(4) is not None, "them to be staged")
