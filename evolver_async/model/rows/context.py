"""Rows of tokens that several ranks compute together: context parallelism.

Every rank computes the layers for a range of the tokens of a packed row. For attention it gets all
tokens of a share of the heads, and gives their outputs back (Ulysses, arXiv 2309.14509): four
exchanges a layer, forward and backward, whose bytes fall with the number of ranks.

Shapes: `T` tokens of a row, `L` those of this rank's range, `N` rows of a table, `H` heads (`K` of
keys and values), `D` head size, `M` hidden size.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """Ranks that compute each row together; all calls are collective.

    rank: this one's number among `count`.
    """

    group: dist.ProcessGroup
    rank: int
    count: int

    def lengths(self, tokens: int) -> list[int]:
        """Return how many of `tokens` each rank has, in their order."""
        least, more = divmod(tokens, self.count)
        return [least + (rank < more) for rank in range(self.count)]

    def own(self, tokens: int) -> slice:
        """Return this rank's range of `tokens`."""
        starts = list(itertools.accumulate(self.lengths(tokens), initial=0))
        return slice(starts[self.rank], starts[self.rank + 1])

    def gathered(self, own_NM: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the rows of all ranks, as many as `lengths` says. Differentiable: gradients of all
        ranks by a row are summed at the rank that computed it."""
        copies = own_NM.repeat(self.count, *[1] * (own_NM.dim() - 1))
        return self._exchanged(copies, [len(own_NM)] * self.count, lengths)

    def heads(
        self, query_LHD: Tensor, key_LKD: Tensor, value_LKD: Tensor, tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of all tokens for this rank's share of the heads.

        Keys and values are repeated where ranks outnumber their heads. Differentiable.
        """
        repeats = self.count // math.gcd(self.count, key_LKD.shape[1])
        if repeats > 1:
            key_LKD = key_LKD.repeat_interleave(repeats, 1)
            value_LKD = value_LKD.repeat_interleave(repeats, 1)
        parts = [one.unflatten(1, (self.count, -1)) for one in (query_LHD, key_LKD, value_LKD)]
        sent = torch.cat(parts, 2).transpose(0, 1).flatten(0, 1)
        found = self._exchanged(sent, [len(query_LHD)] * self.count, self.lengths(tokens))
        query_THD, key_TKD, value_TKD = found.split([one.shape[2] for one in parts], 1)
        return query_THD, key_TKD, value_TKD

    def tokens(self, out_THD: Tensor) -> Tensor:
        """Return the outputs of all heads for this rank's tokens, [L, H, D]. Differentiable."""
        lengths = self.lengths(len(out_THD))
        own = lengths[self.rank]
        found = self._exchanged(out_THD, lengths, [own] * self.count)
        return found.unflatten(0, (self.count, own)).transpose(0, 1).flatten(1, 2)

    def _exchanged(self, sent: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        found = Exchange.apply(sent, list(given), list(taken), self.group)
        assert isinstance(found, Tensor)
        return found


class Exchange(torch.autograd.Function):
    """Consecutive rows of a tensor, `given` to each rank, for those `taken` from each."""

    @staticmethod
    def forward(
        ctx: Any, sent: Tensor, given: list[int], taken: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way = given, taken, group
        return _exchange(sent, given, taken, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        given, taken, group = ctx.way
        return _exchange(gradients[0], taken, given, group), None, None, None


def _exchange(sent: Tensor, given: list[int], taken: list[int], group: dist.ProcessGroup) -> Tensor:
    found = sent.new_empty((sum(taken), *sent.shape[1:]))
    dist.all_to_all_single(found, sent.contiguous(), taken, given, group=group)
    return found
