"""Spans of a packed row: which of its tokens attend in one call, and to which tokens above them.

A call of the attention's kernel costs as much as the attention of many tokens. So short segments
attend together, and what is above them is copied to be keys of their own. What is too long to be
copied for all that is below it is attended to in a call of its own.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

SPAN = 64  # tokens of a span of several segments
NEAR = 256  # tokens above a span that are copied for it
CALL = 512  # tokens whose copies cost as much as a call


@dataclass(frozen=True)
class Branch:
    """Segment with others below it, which follow it: tokens start:end, and all below end:last."""

    start: int
    end: int
    last: int


@dataclass(frozen=True)
class Span:
    """Tokens start:end of a packed row, which attend to each other and to the branches `above`.

    causal: it is one segment with nothing above it, so that every token attends to all before it.
    """

    start: int
    end: int
    above: tuple[Branch, ...]
    causal: bool

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def keys(self) -> int:
        return self.tokens + sum(one.end - one.start for one in self.above)


def far_branches(starts: Sequence[int], branches: Sequence[Branch]) -> set[Branch]:
    """Return the branches to which all tokens below attend in a call of its own.

    starts: of the segments in depth-first order, and the end of the last one.
    """
    index = {start: place for place, start in enumerate(starts)}
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    far, above = set[Branch](), list[Branch]()
    for branch in sorted(branches, key=lambda one: one.start):
        above = [one for one in above if branch.start < one.last]
        length, below = branch.end - branch.start, branch.last - branch.end
        copied = length + sum(one.end - one.start for one in above)
        longest = max(lengths[index[branch.end] : index[branch.last]])
        # Spans are at least half full on average, and a call merges its result into all below.
        cheap = length * below <= SPAN // 2 * (CALL + below)
        if length + below <= SPAN or (copied <= NEAR and longest <= SPAN and cheap):
            above.append(branch)
        else:
            far.add(branch)
    return far


def cut_spans(starts: Sequence[int], branches: Sequence[Branch], far: set[Branch]) -> list[Span]:
    """Cut a packed row into spans, in order; `far` of its branches are above none."""
    ends = dict(itertools.pairwise(starts))  # of the segments, by their starts
    branch_at = {one.start: one for one in branches}
    last_of = ends | {one.start: one.last for one in branches}
    found, over, start = list[Span](), list[Branch](), starts[0]
    while start < starts[-1]:
        over = [one for one in over if start < one.last]
        above = tuple(one for one in over if one not in far)
        end = last_of[start]
        if end - start > SPAN:
            end = ends[start]
            over += [branch_at[start]] if start in branch_at else []
        elif above:  # the segments beside it attend to the same
            while end < over[-1].last and last_of[end] - start <= SPAN:
                end = last_of[end]
        found.append(Span(start, end, above, causal=not above and end == ends[start]))
        start = end
    return found
