"""Staging buffer of a publisher: every channel copies a version there before it sends it."""

import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import Any

import torch

from evolver_async.schema import Array, WeightId
from evolver_async.weights.channel.byte_layout import Layout, aligned, nbytes
from evolver_async.weights.channel.checksums import (
    checksums,
    chunks,
    new_sums,
    region,
    spread,
    sum_chunk,
)
from evolver_async.weights.channel.weight_source import Part, WeightSource

RUN_BYTES = 32 << 20  # copied by several threads before it can be sent


class WeightSnapshot:
    """The entries and the bytes of one version; the buffer is reused for the next.

    From a GPU into `pinned` memory the copies are under way when `stage` returns. They are in the
    GPU's own order, so that later changes of the tensors come after them. Copies by another thread
    are not: `finish_copies` waits for both, and so does `checksums`. `summed`: tensors are summed
    while they are copied.
    """

    def __init__(self, device: str = "cpu", pinned: bool = False, summed: bool = True) -> None:
        self.bytes_N = torch.empty(0, dtype=torch.uint8, device=device)
        self.weights = WeightId(lineage=0, step=0)
        self.tensors: dict[str, dict[str, Any]] = {}
        self._pinned, self._summed = pinned, summed
        self._sums: dict[str, Array] = {}  # of the tensors that were summed while they were copied
        self._copied: torch.cuda.Event | None = None
        self._copying: Future[None] | None = None
        self._filled = 0  # number of first bytes that another thread has copied
        self._progress = threading.Condition()

    def claim(self, layout: Layout) -> bool:
        """Return True if the buffer may be filled with such a version."""
        return layout.size == len(self.bytes_N)

    def discard(self) -> None:
        """Give up the buffer."""
        self.bytes_N = torch.empty(0, dtype=torch.uint8, device=self.bytes_N.device)

    def stage(
        self,
        weights: WeightId,
        source: WeightSource,
        threads: int,
        beside: Executor | None = None,
    ) -> None:
        """Copy the bytes of `source`, from whatever device, each to its place.

        `beside`: copies from host memory are its work, and under way when this returns.
        """
        layout = source.layout
        self.weights, self.tensors, self._sums = weights, layout.entries, {}
        self._filled = 0
        if layout.size != len(self.bytes_N):
            self.bytes_N = torch.zeros(
                layout.size,
                dtype=torch.uint8,
                device=self.bytes_N.device,
                pin_memory=self._pinned,
            )
        if beside is not None and source.on_host and not self.bytes_N.is_cuda:
            self._copying = beside.submit(self._fill, source, threads)
            self._copying.add_done_callback(lambda _: self._fill_to(self._filled))
        else:
            self._fill(source, threads)

    def _fill(self, source: WeightSource, threads: int) -> None:
        for parts in source.parts():
            if self.bytes_N.is_cuda or any(part.bytes_N.is_cuda for part in parts):
                self._copy_on_gpu(parts)
                continue
            for run in _runs(parts):
                spread(_copy, self._copies(run), threads)
                for part in run:
                    start = self.tensors[part.name]["offset"] + part.start
                    if start <= aligned(self._filled):  # else it follows a gap
                        self._fill_to(max(self._filled, start + len(part.bytes_N)))

    def checksums(self, threads: int) -> dict[str, int]:
        """Return the checksum of every tensor."""
        self.finish_copies()
        return checksums(self.bytes_N.numpy(), self.tensors, threads, self._sums)

    def await_bytes(self, end: int) -> None:
        """Wait until the bytes before `end` are copied; raise errors of the copy."""
        if (copying := self._copying) is not None and self._copied is None:
            with self._progress:
                self._progress.wait_for(lambda: self._filled >= end or copying.done())
            if not copying.done():
                return
        self.finish_copies()

    def _fill_to(self, end: int) -> None:
        with self._progress:
            self._filled = end
            self._progress.notify_all()

    def finish_copies(self) -> None:
        """Wait for the copies from a GPU and for those by another thread; raise their errors."""
        if (copying := self._copying) is not None:
            copying.result()
            self._copying = None
        if (copied := self._copied) is not None:  # two threads can wait at once
            copied.synchronize()
            self._copied = None

    def _copy_on_gpu(self, parts: list[Part]) -> None:
        """Begin to copy `parts` in the order of the GPU's present stream."""
        for part in parts:
            start = self.tensors[part.name]["offset"] + part.start
            place_N = self.bytes_N[start : start + len(part.bytes_N)]
            place_N.copy_(part.bytes_N, non_blocking=True)
            gpu = part.bytes_N.device if part.bytes_N.is_cuda else place_N.device
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(gpu))

    def _copies(self, parts: list[Part]) -> list[tuple[Array, Array, Array | None, slice]]:
        """Return the work of copying `parts`: place, bytes, sums of a whole tensor, chunk."""
        data, work = self.bytes_N.numpy(), []
        for part in parts:
            entry, from_N = self.tensors[part.name], part.bytes_N.numpy()
            start = entry["offset"] + part.start
            to_N, sums = data[start : start + len(from_N)], None
            if self._summed and len(from_N) == nbytes(entry):
                to_N = data[region(entry)]
                sums = self._sums[part.name] = new_sums(len(to_N))
            work += [(to_N, from_N, sums, chunk) for chunk in chunks(len(to_N))]
        return work


def _runs(parts: list[Part]) -> Iterator[list[Part]]:
    """Cut parts into runs of RUN_BYTES or little more."""
    run: list[Part] = []
    for part in parts:
        run.append(part)
        if sum(len(one.bytes_N) for one in run) >= RUN_BYTES:
            yield run
            run = []
    yield run


def _copy(to_N: Array, from_N: Array, sums: Array | None, chunk: slice) -> None:
    """Copy a chunk and sum it while it is in the cache."""
    found_N = from_N[chunk]
    to_N[chunk.start : chunk.start + len(found_N)] = found_N
    if sums is not None:
        sum_chunk(to_N, sums, chunk)
