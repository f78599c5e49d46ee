"""Weights of a sharded model on their way to rank 0, bucket by bucket.

Every rank's share of a tensor is a run of its rows. The shares of all tensors, each filled up to
the size of the first rank's, are one stream of bytes a rank, of equal length on all; the ranks
gather it in buckets, from which rank 0 takes the parts of tensors. So none holds more than a bucket
besides its own share, rank 0 one of every rank, and small tensors travel together.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from evolver_async.errors import Inconsistency
from evolver_async.model import policy
from evolver_async.weights.channel.byte_layout import Layout, aligned, nbytes
from evolver_async.weights.channel.weight_source import Part, whole_part
from learner.ranks.mesh import Ranks

BUCKET_BYTES = 8 << 20  # of all ranks together


@dataclass(frozen=True)
class Segment:
    """Bytes `start` to `end` of every rank's share of a tensor, and their place in the bucket."""

    name: str
    start: int
    end: int
    place: int


class GatheredWeights:
    """Source of a sharded model's weights in `dtype`; see `WeightSource`. All ranks iterate it."""

    def __init__(self, model: torch.nn.Module, ranks: Ranks, dtype: str) -> None:
        self._ranks = ranks
        self._tensors = policy.state_tensors(model)
        self._dtypes = {
            name: getattr(torch, dtype) if one.is_floating_point() else one.dtype
            for name, one in self._tensors.items()
        }
        self.layout = Layout.of(
            (name, self._dtypes[name], one.shape) for name, one in self._tensors.items()
        )
        self.on_host = False  # the ranks work together, each in its own thread
        self._sharded = [name for name, one in self._tensors.items() if isinstance(one, DTensor)]

    def parts(self) -> Iterator[list[Part]]:
        """Yield parts on rank 0, empty lists on the others."""
        ranks = self._ranks
        if ranks.rank == 0:
            others = [name for name in self._tensors if name not in self._sharded]
            yield [
                whole_part(name, self._tensors[name].to(self._dtypes[name]).contiguous())
                for name in others
            ]
        if ranks.rank >= ranks.shards:
            return  # another copy
        size = aligned(BUCKET_BYTES // ranks.shards)
        sent_N = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
        found_RN = [torch.zeros_like(sent_N) for _ in range(1, ranks.shards) if ranks.rank == 0]
        # Not `gather`: gloo's takes memory for all buckets once more.
        calls = [dist.P2POp(dist.irecv, one_N, rank) for rank, one_N in enumerate(found_RN, 1)]
        if ranks.rank > 0:
            calls = [dist.P2POp(dist.isend, sent_N, 0)]
        found_RN = [sent_N, *found_RN] if ranks.rank == 0 else []
        for segments in self._buckets(size):
            for segment in segments:
                self._fill(segment, sent_N)
            for work in dist.batch_isend_irecv(calls) if calls else ():
                work.wait()
            yield [
                part
                for rank, found_N in enumerate(found_RN)
                for segment in segments
                for part in self._part(segment, rank, found_N)
            ]

    def _buckets(self, size: int) -> Iterator[list[Segment]]:
        """Cut the stream of shares into buckets of at most `size` bytes."""
        segments: list[Segment] = []
        place = 0
        for name in self._sharded:
            start, share = 0, self._share_bytes(name)
            while start < share:
                end = min(share, start + size - place)
                segments.append(Segment(name, start, end, place))
                place = aligned(place + end - start)
                start = end
                if place == size:
                    yield segments
                    segments, place = [], 0
        if segments:
            yield segments

    def _fill(self, segment: Segment, sent_N: Tensor) -> None:
        """Put this rank's bytes of a segment, as far as it has any, into its bucket."""
        tensor, dtype = self._tensors[segment.name], self._dtypes[segment.name]
        if not isinstance(tensor, DTensor) or tensor.placements[-1] != Shard(0):
            raise Inconsistency(f"{segment.name}: is not sharded by its rows")
        first, last = segment.start // dtype.itemsize, segment.end // dtype.itemsize
        share_N = tensor.to_local().reshape(-1)[first:last]
        place_N = sent_N[segment.place : segment.place + len(share_N) * dtype.itemsize]
        place_N.view(dtype).copy_(share_N)

    def _part(self, segment: Segment, rank: int, found_N: Tensor) -> list[Part]:
        """Return the bytes of a segment that `rank` had, if any."""
        entry = self.layout.entries[segment.name]
        before = rank * self._share_bytes(segment.name)
        size = min(segment.end, nbytes(entry) - before) - segment.start
        if size <= 0:
            return []
        place_N = found_N[segment.place : segment.place + size]
        return [Part(segment.name, before + segment.start, place_N)]

    def _share_bytes(self, name: str) -> int:
        """Bytes of the first rank's rows of a tensor, of which no rank has more."""
        entry = self.layout.entries[name]
        rows = entry["shape"][0]
        return -(-rows // self._ranks.shards) * (nbytes(entry) // max(1, rows))
