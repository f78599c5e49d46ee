"""Micro-batches of rows that share nothing, as masks over their tokens."""

import torch

from learner.data.batch import MicroBatch


def actions(micro: MicroBatch) -> torch.Tensor:
    """ACTION tokens that have a context to be predicted from, bool like tokens_BT."""
    assert micro.borders is None or not micro.borders.branches
    action_BT = torch.zeros_like(micro.tokens_BT, dtype=torch.bool)
    action_BT.view(-1)[micro.read_K[micro.source_N] + 1] = True
    return action_BT
