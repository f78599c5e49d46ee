"""Broadcast groups of one process: alone, and with a peer that never comes (gloo on the CPU)."""

import time
from datetime import timedelta

import pytest
import torch
from figures import Figure
from torch import distributed as dist

from evolver_async.weights.collective.process_group import BroadcastGroup, CastFailed, checksum

DEADLINE_S = 5.0
LATE_S = 5.0  # how much longer than the deadline giving up may take


def broadcast(group: BroadcastGroup) -> None:
    """As the learner does it; CastFailed or RuntimeError where it comes to nothing."""
    bytes_N = torch.arange(4096, dtype=torch.int64).view(torch.uint8)
    part = group.broadcast(bytes_N)
    assert part.checksum() == checksum(bytes_N), "wherever it is computed"
    if not part.done(DEADLINE_S):
        raise CastFailed("no progress")


def test_a_group_without_its_peer_is_given_up_and_the_next_one_works(
    device: torch.device, figure: Figure
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    name = "" if device.type == "cpu" else "cuda:0"

    def group(epoch: int, size: int) -> BroadcastGroup:
        return BroadcastGroup(
            store, epoch, 0, size, host="127.0.0.1", device=name, deadline_s=DEADLINE_S
        )

    first = group(1, 1)
    broadcast(first)
    first.abandon()
    start = time.monotonic()
    with pytest.raises((CastFailed, RuntimeError)):
        lonely = group(2, 2)
        try:
            broadcast(lonely)
        finally:
            lonely.abandon()
    spent = time.monotonic() - start
    figure("a group whose peer never comes", spent, "s")
    if device.type == "cuda":  # a busy CPU says nothing about this bound
        assert spent < DEADLINE_S + LATE_S
    start = time.monotonic()
    last = group(3, 1)
    broadcast(last)
    figure("a group of one, with its first broadcast", time.monotonic() - start, "s")
    last.abandon()
