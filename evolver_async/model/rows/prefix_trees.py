"""Trees of rows of tokens: what rows have in common at their beginnings is laid out once.

Shapes: `R` rows, `Q` different rows, `A` tokens of all rows laid end to end, `T` tokens of a packed
row.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from evolver_async.model.rows.borders import Array, Borders
from evolver_async.model.rows.tree_spans import Branch

LEAST_SAVED = 16  # tokens that a shared segment must save; a shorter one is repeated


@dataclass(frozen=True)
class TreeSegment:
    """Tokens depth:end of the rows at places low:high of an order, which agree up to there."""

    low: int
    high: int
    depth: int
    end: int


@dataclass(frozen=True)
class Merged:
    """Rows merged into trees: token i of the packed row is token source_T[i] of the rows laid end
    to end; place_A: place in the packed row of every token of these."""

    source_T: Array
    place_A: Array
    borders: Borders


class SortedRows:
    """Rows of tokens in an order in which those that begin alike are neighbours.

    rank_R int64: place of every row among the different ones; equal rows have the same. length_Q
    int64, and common_Q int64: tokens in common with the row before; first_Q int64: a row of each.
    """

    def __init__(self, rows: Sequence[Array]) -> None:
        """Sort rows, at least one, none empty."""
        keys = [row.astype(">u4").tobytes() for row in rows]
        rank = {one: place for place, one in enumerate(sorted(set(keys)))}
        self.rank_R = np.array([rank[one] for one in keys])
        self.first_Q = np.unique(self.rank_R, return_index=True)[1]
        different = [rows[first] for first in self.first_Q]
        self.length_Q = np.array([len(row) for row in different])
        pairs = itertools.pairwise(different)
        self.common_Q = np.array([0, *(common_prefix(*pair) for pair in pairs)])

    def new_R(self) -> Array:
        """Return the tokens that every row adds to those before it in the order."""
        new_R = np.zeros_like(self.rank_R)
        new_R[self.first_Q] = self.length_Q - self.common_Q
        return new_R

    def size(self, chosen: Array) -> int:
        """Return the tokens of the packed row that `merge` makes of the chosen rows."""
        places = np.unique(self.rank_R[chosen])
        common = self.common_Q[:1]
        if len(places) > 1:
            until = self.common_Q[: places[-1] + 1]
            common = np.concatenate([common, np.minimum.reduceat(until, places[:-1] + 1)])
        return sum(one.end - one.depth for one in _segments(self.length_Q[places], common))


def common_prefix(first: Array, second: Array) -> int:
    """Return the number of tokens with which both begin."""
    shorter = min(len(first), len(second))
    differ = (first[:shorter] != second[:shorter]).nonzero()[0]
    return int(differ[0]) if len(differ) else shorter


def _segments(length_Q: Array, common_Q: Array) -> Iterator[TreeSegment]:
    """Yield the segments of different rows in depth-first order."""
    lengths, common = length_Q.tolist(), common_Q.tolist()
    todo = [(0, len(lengths), 0)]
    while todo:
        # Rows low:high agree in their first tokens, of which `depth` are laid out already.
        low, high, depth = todo.pop()
        if high - low == 1:
            if lengths[low] > depth:
                yield TreeSegment(low, high, depth, lengths[low])
            continue
        shared = min(common[low + 1 : high])
        cuts = [place for place in range(low + 1, high) if common[place] == shared]
        if (shared - depth) * (high - low - 1) >= LEAST_SAVED:
            yield TreeSegment(low, high, depth, shared)
            depth = shared
        parts = list(itertools.pairwise([low, *cuts, high]))
        todo += [(first, last, depth) for first, last in reversed(parts)]


def merge(rows: Sequence[Array], device: torch.device) -> Merged:
    """Merge what rows of tokens have in common at their beginning, if it saves `LEAST_SAVED`.

    At least one row, none empty. Equal rows are one.
    """
    starts = list(itertools.accumulate((len(row) for row in rows), initial=0))
    order = SortedRows(rows)
    segments = list(_segments(order.length_Q, order.common_Q))
    laid = list(itertools.accumulate((one.end - one.depth for one in segments), initial=0))
    sources: list[Array] = []
    place_QL = [np.empty(length, np.int64) for length in order.length_Q]
    for one, start in zip(segments, laid, strict=False):
        source = starts[order.first_Q[one.low]]
        sources.append(np.arange(source + one.depth, source + one.end))
        place = np.arange(start, start + one.end - one.depth)
        for row in place_QL[one.low : one.high]:
            row[one.depth : one.end] = place
    joined = _joined(segments)
    lengths = [(one.end - one.depth, one.depth) for one in joined]
    return Merged(
        source_T=np.concatenate(sources),
        place_A=np.concatenate([place_QL[rank] for rank in order.rank_R]),
        borders=Borders.trees(lengths, _branches(joined), device),
    )


def _joined(segments: Sequence[TreeSegment]) -> list[TreeSegment]:
    """Make one segment of those that follow one another without others beside them.

    Such are rows of which one is the beginning of the next, as the contexts of a conversation.
    """
    found = [segments[0]]
    for one in segments[1:]:
        above = found[-1]
        if (one.depth, one.high) == (above.end, above.high):
            found[-1] = TreeSegment(above.low, above.high, above.depth, one.end)
        else:
            found.append(one)
    return found


def _branches(segments: Sequence[TreeSegment]) -> list[Branch]:
    """Return the branches of segments in depth-first order, laid one behind the other."""
    laid = list(itertools.accumulate((one.end - one.depth for one in segments), initial=0))
    found: list[Branch] = []
    above: list[int] = []
    for index, one in enumerate([*segments, None]):
        while above and (one is None or segments[above[-1]].high <= one.low):
            closed = above.pop()
            if closed < index - 1:
                found.append(Branch(laid[closed], laid[closed + 1], laid[index]))
        above.append(index)
    return found
