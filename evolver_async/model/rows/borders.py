"""Layout of a packed row: many sequences in one row, and trees of those that begin alike.

A row consists of segments, in depth-first order. A segment continues the one above it in its tree;
a sequence that shares nothing is a tree of one segment. Tokens attend within their segment and to
all segments above it, so a shared beginning is computed once.

Shapes: `T` tokens of a packed row, `S` segments, `R` rows of a block, `L` their length.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evolver_async.model.rows.context import ContextGroup
from evolver_async.model.rows.tree_spans import Branch, Span, cut_spans, far_branches

SIMILAR = 0.75  # least length in a block, as a fraction of its longest row
SHORT = 8  # tokens of a row that shares a block with all shorter ones

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PaddedRows:
    """Tokens of a packed row as `rows` rows of `longest` tokens.

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
        """Arrange the tokens as rows [R, H, longest, D]; padding repeats a token."""
        rows = part_THD.index_select(0, self.fill_T)
        return rows.unflatten(0, (self.rows, self.longest)).transpose(1, 2)

    def spread(self, part_THD: Tensor, padding: float) -> Tensor:
        """Arrange the tokens as rows [R, H, longest, D] with a value for padding."""
        rows = part_THD.new_full((self.rows * self.longest, *part_THD.shape[1:]), padding)
        rows.index_copy_(0, self.index_T, part_THD.index_select(0, self.source_T))
        return rows.unflatten(0, (self.rows, self.longest)).transpose(1, 2)

    def real(self, part_RHLD: Tensor) -> Tensor:
        """Return the tokens of such rows without padding, [T, H, D] in the order of source_T."""
        return part_RHLD.transpose(1, 2).flatten(0, 1).index_select(0, self.index_T)


@dataclass(frozen=True)
class Block:
    """Spans of similar length, or short ones: the rows `queries`, which attend to the rows `keys`.

    mask float32 [R, 1, L, L of the keys]: what is added to the scores, -inf where a token does not
    attend. Without one the keys are the queries, and a token attends to those before it.
    """

    queries: PaddedRows
    keys: PaddedRows
    mask: Tensor | None


@dataclass(frozen=True)
class Calls:
    """Calls of the kernels for padded rows that compute the attention of a packed row.

    far: the branches that no block has as keys; order_T int64 [T]: place of every token among the
    queries of all blocks, laid end to end.
    """

    far: tuple[Branch, ...]
    blocks: tuple[Block, ...]
    order_T: Tensor


@dataclass(frozen=True)
class Sequences:
    """Ranges of a packed row as consecutive sequences of a kernel for varying lengths.

    source_N int64: places of their N tokens in the packed row; starts_S1 int32 [S+1].
    """

    source_N: Tensor
    starts_S1: Tensor
    longest: int


@dataclass(frozen=True)
class BranchLevel:
    """The branches that have as many above them: all tokens below each attend to it.

    Sequence i of `below` are these tokens, sequence i of `above` the branch.
    """

    below: Sequences
    above: Sequences


@dataclass(frozen=True)
class Borders:
    """Starts of the segments of a packed row, and every token's position in its sequence.

    starts: of the segments, and the end of the last one; starts_S1 int32 [S+1] are the same on the
    device, position_1T int64 [1, T]. context: the ranks that compute the row together, None if this
    one does so alone.
    """

    starts: tuple[int, ...]
    starts_S1: Tensor
    position_1T: Tensor
    branches: tuple[Branch, ...]
    context: ContextGroup | None = None

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Borders":
        """Make the borders of consecutive sequences of these lengths; at least one, none empty."""
        return cls.trees([(length, 0) for length in lengths], (), device)

    @classmethod
    def trees(
        cls, segments: Sequence[tuple[int, int]], branches: Sequence[Branch], device: torch.device
    ) -> "Borders":
        """Make the borders of consecutive segments given by length and first position."""
        starts = tuple(itertools.accumulate((length for length, _ in segments), initial=0))
        positions = [np.arange(first, first + length) for length, first in segments]
        return cls(
            starts=starts,
            starts_S1=torch.tensor(starts, dtype=torch.int32).to(device),
            position_1T=torch.from_numpy(np.concatenate(positions))[None].to(device),
            branches=tuple(branches),
        )

    @cached_property
    def longest(self) -> int:
        """Number of tokens of the longest segment."""
        return max(end - start for start, end in itertools.pairwise(self.starts))

    @cached_property
    def calls(self) -> Calls:
        far = far_branches(self.starts, self.branches)
        last_T = np.repeat(np.array(self.starts[1:], np.int32), np.diff(self.starts))
        for branch in self.branches:
            last_T[branch.start : branch.end] = branch.last
        similar = _similar(cut_spans(self.starts, self.branches, far))
        blocks = tuple(_block(some, last_T, self.position_1T.device) for some in similar)
        return Calls(
            far=tuple(one for one in self.branches if one in far),
            blocks=blocks,
            order_T=torch.cat([block.queries.source_T for block in blocks]).argsort(),
        )

    @cached_property
    def levels(self) -> tuple[BranchLevel, ...]:
        """The branches by the number of those above them, none first."""
        found: list[list[Branch]] = []
        above: list[Branch] = []
        for branch in sorted(self.branches, key=lambda one: one.start):
            above = [one for one in above if branch.start < one.last]
            if len(above) == len(found):
                found.append([])
            found[len(above)].append(branch)
            above.append(branch)
        device = self.position_1T.device
        return tuple(
            BranchLevel(
                below=_sequences([(one.end, one.last) for one in some], device),
                above=_sequences([(one.start, one.end) for one in some], device),
            )
            for some in found
        )


def _sequences(ranges: Sequence[tuple[int, int]], device: torch.device) -> Sequences:
    lengths = [end - start for start, end in ranges]
    starts = list(itertools.accumulate(lengths, initial=0))
    places = np.concatenate([np.arange(start, end) for start, end in ranges])
    return Sequences(
        source_N=torch.from_numpy(places).to(device),
        starts_S1=torch.tensor(starts, dtype=torch.int32).to(device),
        longest=max(lengths),
    )


def _similar(spans: Sequence[Span]) -> list[list[Span]]:
    """Split spans, longest first, into blocks: the shortest is `SIMILAR` times the longest, or that
    has at most `SHORT` tokens. Where keys are copied, the longest are less than twice the shortest.
    """
    blocks: list[list[Span]] = []
    kind_of = {one.start: 0 if one.causal else one.keys.bit_length() for one in spans}
    for one in sorted(spans, key=lambda one: (kind_of[one.start], -one.tokens)):
        if blocks and kind_of[one.start] == kind_of[blocks[-1][0].start]:
            longest = blocks[-1][0].tokens
            if longest <= SHORT or one.tokens >= SIMILAR * longest:
                blocks[-1].append(one)
                continue
        blocks.append([one])
    return blocks


def _block(some: Sequence[Span], last_T: Array, device: torch.device) -> Block:
    """Make the block of spans; last_T: the end of the tokens below every token's segment."""
    spans_R = [np.arange(one.start, one.end, dtype=np.int32) for one in some]
    query_RL = _filled(spans_R)
    queries = _rows(query_RL, device)
    if some[0].causal:
        return Block(queries, queries, None)
    above_R = [[np.arange(up.start, up.end, dtype=np.int32) for up in one.above] for one in some]
    parts_R = ([*above, span] for above, span in zip(above_R, spans_R, strict=True))
    key_RL = _filled([np.concatenate(parts) for parts in parts_R])
    below_RL = np.append(last_T, 0)[key_RL]  # nothing is below padding
    attends_RLL = key_RL[:, None] <= query_RL[:, :, None]
    attends_RLL &= query_RL[:, :, None] < below_RL[:, None]
    mask_RLL = np.where(attends_RLL, np.float32(0), np.float32("-inf"))
    mask_RLL[query_RL < 0, 0] = 0  # a query without any key would give NaN
    mask = torch.from_numpy(mask_RLL[:, None]).to(device)
    return Block(queries, _rows(key_RL, device), mask)


def _filled(places_R: Sequence[Array]) -> Array:
    """Return rows of places as one array [R, L], padded by -1."""
    lengths_R = np.array([len(one) for one in places_R])
    place_RL = np.full((len(places_R), lengths_R.max()), -1, np.int32)
    place_RL[np.arange(lengths_R.max()) < lengths_R[:, None]] = np.concatenate(places_R)
    return place_RL


def _rows(place_RL: Array, device: torch.device) -> PaddedRows:
    def tensor(array: Array) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    real_RL = place_RL >= 0
    return PaddedRows(
        rows=place_RL.shape[0],
        longest=place_RL.shape[1],
        source_T=tensor(place_RL[real_RL]),
        index_T=tensor(np.flatnonzero(real_RL)),
        fill_T=tensor(np.maximum(place_RL, 0).ravel()),
    )
