"""Memory of received versions: used again once nobody has a tensor of it, and never before."""

import torch

from evolver_async.schema import WeightId
from evolver_async.weights.channel.byte_layout import Layout
from evolver_async.weights.collective.versions import ReceivedVersion, ReceivedVersions

LAYOUT = Layout.of([("a", torch.float32, (100,)), ("b", torch.float32, (3, 5))])


def version(step: int) -> WeightId:
    return WeightId(lineage=1, step=step)


def receive(versions: ReceivedVersions, step: int) -> int:
    """Commit a version as the only one; return the address of its memory."""
    bytes_N = versions.buffer(LAYOUT.size)
    bytes_N.fill_(step)
    received = ReceivedVersion(bytes_N, LAYOUT.entries)
    versions.commit(version(step), received, {version(step)}, version(step))
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


def test_the_head_takes_effect_with_its_version() -> None:
    versions, size = ReceivedVersions(), LAYOUT.size
    both = {version(1), version(2)}
    first, second = (ReceivedVersion(versions.buffer(size), LAYOUT.entries) for _ in range(2))
    versions.commit(version(1), first, both, version(2))
    assert versions.head is None and versions.available() == [version(1)]
    versions.commit(version(2), second, both, version(2))
    assert versions.head == version(2) and versions.available() == [version(1), version(2)]
