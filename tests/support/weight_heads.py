"""Heads of a weight channel, as a receiver sees them while versions are published."""

import os
from pathlib import Path

import pytest
import torch

from evolver_async.schema import WeightId
from evolver_async.weights.channel.interface import Publisher, Receiver


def check_heads(publisher: Publisher, receiver: Receiver) -> None:
    """Publish three versions: whatever the publisher renames, the head can be fetched after it."""
    replace, fetched = os.replace, list[WeightId | None]()

    def looked(*paths: Path) -> None:
        replace(*paths)
        fetched.append(head := receiver.head())
        if head is not None:
            assert bool((receiver.fetch(head)["a"] == head.step).all())

    versions = [WeightId(lineage=1, step=step) for step in (1, 2, 3)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "replace", looked)
        for one in versions:
            publisher.publish(one, {"a": torch.full((9,), float(one.step))})
    assert [*dict.fromkeys(fetched)] == [None, *versions]
