"""Memory of received versions: used again once nobody has a tensor of it, and never before."""

import threading

import pytest
import torch
from launches import wait_for

from evolver_async.schema import WeightId
from evolver_async.weights.channel.byte_layout import Layout
from evolver_async.weights.channel.interface import WeightsGone
from evolver_async.weights.collective.versions import ReceivedVersion, ReceivedVersions

LAYOUT = Layout.of([("a", torch.float32, (100,)), ("b", torch.float32, (3, 5))])


def version(step: int) -> WeightId:
    return WeightId(lineage=1, step=step)


def receive(versions: ReceivedVersions, step: int) -> int:
    """Commit a version as the only one; return the address of its memory."""
    bytes_N = versions.buffer(LAYOUT.size)
    bytes_N.fill_(step)
    received = ReceivedVersion(bytes_N, LAYOUT.entries)
    versions.commit(version(step), received, [version(step)], version(step))
    return bytes_N.data_ptr()


def test_memory_of_a_version_that_is_dropped_is_filled_again() -> None:
    versions = ReceivedVersions()
    places = [receive(versions, step) for step in range(6)]
    assert places[:2] * 2 == places[:4] and places[0] != places[1]


def test_memory_is_not_filled_again_while_one_tensor_of_a_fetch_is_held() -> None:
    versions = ReceivedVersions()
    place = receive(versions, 1)
    held = versions.fetch(version(1))["b"]
    before = held.clone()
    assert place not in [receive(versions, step) for step in range(2, 6)]
    assert torch.equal(held, before)


def test_a_version_that_has_served_gives_its_memory_to_the_next() -> None:
    versions = ReceivedVersions()
    place = receive(versions, 1)
    held = versions.fetch(version(1))
    assert versions.buffer(LAYOUT.size).data_ptr() != place, "an engine still has it"
    del held
    for step in (2, 3):
        assert receive(versions, step) == place
        versions.fetch(version(step))


def test_a_version_that_is_not_here_is_requested_as_long_as_the_learner_keeps_it() -> None:
    versions = ReceivedVersions(keep=1)
    kept = [version(1), version(2)]
    assert not versions.lacks(version(1), kept), "older than the newest one"
    versions.commit(version(1), None, kept, version(2))
    assert versions.lacks(version(2), kept)
    versions.commit(version(2), ReceivedVersion(receive_into(versions, 2), LAYOUT.entries), *at(2))
    assert not versions.lacks(version(2), kept), "it is here"
    found = list[float]()
    waiting = threading.Thread(
        target=lambda: found.append(float(versions.fetch(version(1))["a"].view(torch.uint8)[0]))
    )
    waiting.start()
    requests = list[WeightId]()
    wait_for(lambda: requests.extend(versions.requests()) or requests, "the request")
    assert requests == [version(1)] and versions.requests() == []
    assert versions.lacks(version(1), kept) and versions.available() == kept
    versions.commit(version(1), ReceivedVersion(receive_into(versions, 1), LAYOUT.entries), *at(2))
    waiting.join()
    assert found == [1.0]
    versions.commit(version(3), None, [version(3)], version(3))
    with pytest.raises(WeightsGone):
        versions.fetch(version(1))
    assert versions.available() == [version(3)]


def at(head: int) -> tuple[list[WeightId], WeightId]:
    """What the learner says with a cast: all that it keeps, and the newest."""
    return [version(step) for step in range(1, head + 1)], version(head)


def receive_into(versions: ReceivedVersions, step: int) -> torch.Tensor:
    return versions.buffer(LAYOUT.size).fill_(step)


def test_the_head_takes_effect_with_its_version() -> None:
    versions, size = ReceivedVersions(), LAYOUT.size
    both = [version(1), version(2)]
    first, second = (ReceivedVersion(versions.buffer(size), LAYOUT.entries) for _ in range(2))
    versions.commit(version(1), first, both, version(2))
    assert versions.head is None and versions.available() == [version(1)]
    versions.commit(version(2), second, both, version(2))
    assert versions.head == version(2) and versions.available() == [version(1), version(2)]
