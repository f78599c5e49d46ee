"""Whole tensors of what a learner publishes."""

import torch

from evolver_async.schema import WeightId
from evolver_async.weights.channel.byte_layout import views
from evolver_async.weights.channel.snapshot import WeightSnapshot
from evolver_async.weights.channel.weight_source import WeightSource


def whole_tensors(source: WeightSource) -> dict[str, torch.Tensor]:
    """Copies, as a publisher stages them."""
    snapshot = WeightSnapshot()
    snapshot.stage(WeightId(lineage=1, step=0), source, threads=1)
    return views(snapshot.bytes_N, snapshot.tensors)
