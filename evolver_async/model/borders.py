"""Layout of a packed row: many sequences in one row, and trees of those that begin alike.

A row consists of segments, in depth-first order. A segment continues the one above it in its tree;
a sequence that shares nothing is a tree of one segment. Tokens attend within their segment and to
all segments above it, so a shared beginning is computed once.

Shapes: `T` tokens of a packed row, `S` segments.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

SIMILAR = 0.75  # least length in a block, as a fraction of its longest segment

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PaddedBlock:
    """Segments of similar length as rows of `longest` tokens.

    source_T int64: places of its tokens in the packed row; index_T int64: their places in the
    flattened rows; fill_T int64 [rows · longest]: the place in the packed row of every token of the
    rows, 0 for padding.
    """

    rows: int
    longest: int
    source_T: Tensor
    index_T: Tensor
    fill_T: Tensor

    def take(self, part_THD: Tensor) -> Tensor:
        """Arrange the block's tokens as rows [S, H, longest, D]; padding repeats a token."""
        rows = part_THD.index_select(0, self.fill_T)
        return rows.unflatten(0, (self.rows, self.longest)).transpose(1, 2)

    def spread(self, part_THD: Tensor, padding: float) -> Tensor:
        """Arrange the block's tokens as rows [S, H, longest, D] with a value for padding."""
        rows = part_THD.new_full((self.rows * self.longest, *part_THD.shape[1:]), padding)
        rows.index_copy_(0, self.index_T, part_THD.index_select(0, self.source_T))
        return rows.unflatten(0, (self.rows, self.longest)).transpose(1, 2)

    def real(self, part_SHLD: Tensor) -> Tensor:
        """Return the tokens of such rows without padding, [T, H, D] in the order of source_T."""
        return part_SHLD.transpose(1, 2).flatten(0, 1).index_select(0, self.index_T)


@dataclass(frozen=True)
class Branch:
    """Segment with others below it, which follow it: tokens start:end, and all below end:last."""

    start: int
    end: int
    last: int


@dataclass(frozen=True)
class Borders:
    """Starts of the segments of a packed row, and every token's position in its sequence.

    starts_S1 int32 [S+1], position_1T int64 [1, T]; order_T int64 [T]: place of every token among
    those of all blocks, laid end to end.
    """

    starts_S1: Tensor
    position_1T: Tensor
    longest: int
    blocks: tuple[PaddedBlock, ...]
    order_T: Tensor
    branches: tuple[Branch, ...] = ()

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Borders":
        """Make the borders of consecutive sequences of these lengths; at least one, none empty."""
        return cls.trees([(length, 0) for length in lengths], (), device)

    @classmethod
    def trees(
        cls, segments: Sequence[tuple[int, int]], branches: Sequence[Branch], device: torch.device
    ) -> "Borders":
        """Make the borders of consecutive segments given by length and first position."""
        lengths = [length for length, _ in segments]
        starts = list(itertools.accumulate(lengths, initial=0))
        positions = [np.arange(first, first + length) for length, first in segments]
        blocks = tuple(_block(starts, lengths, some, device) for some in _similar(lengths))
        return cls(
            starts_S1=torch.tensor(starts, dtype=torch.int32).to(device),
            position_1T=torch.from_numpy(np.concatenate(positions))[None].to(device),
            longest=max(lengths),
            blocks=blocks,
            order_T=torch.cat([block.source_T for block in blocks]).argsort(),
            branches=tuple(branches),
        )


def _similar(lengths: list[int]) -> list[list[int]]:
    """Split segments, longest first, into blocks: the shortest is `SIMILAR` times the longest."""
    order = sorted(range(len(lengths)), key=lambda one: -lengths[one])
    blocks = [[order[0]]]
    for one in order[1:]:
        if lengths[one] >= SIMILAR * lengths[blocks[-1][0]]:
            blocks[-1].append(one)
        else:
            blocks.append([one])
    return blocks


def _block(
    starts: list[int], lengths: list[int], chosen: list[int], device: torch.device
) -> PaddedBlock:
    longest = max(lengths[one] for one in chosen)
    length_S = np.array([lengths[one] for one in chosen])
    place_SL = np.array([starts[one] for one in chosen])[:, None] + np.arange(longest)
    real_SL = np.arange(longest) < length_S[:, None]

    def tensor(array: Array) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PaddedBlock(
        rows=len(chosen),
        longest=longest,
        source_T=tensor(place_SL[real_SL]),
        index_T=tensor(np.flatnonzero(real_SL)),
        fill_T=tensor(np.where(real_SL, place_SL, 0).ravel()),
    )
