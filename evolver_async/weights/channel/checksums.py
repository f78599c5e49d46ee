"""Checksums of tensors, by several threads, in chunks that stay in a processor's cache.

A checksum is the CRC32 of the sums of 512 64-bit words each, and of the words after the last whole
block. It detects every change within a word and, with a probability of all but 2^-32, blocks that
were mixed, cut or moved; CRC32 of all bytes takes several times as long as copying them.

The work is numpy's, which releases the interpreter and has no threads of its own: torch's would
start a team for each thread that calls it.
"""

import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from evolver_async.process.processors import processors
from evolver_async.schema import Array
from evolver_async.weights.channel.byte_layout import aligned, nbytes

BLOCK = 4096  # bytes that are summed before CRC32
CHUNK = 1 << 20  # bytes of one piece of work; a multiple of BLOCK
FEW = 8  # pieces of work that are not worth a thread
MOST_THREADS = 8  # a few threads use all of the memory's bandwidth


def usual_threads() -> int:
    """Return the number of threads for copies on this machine."""
    return min(MOST_THREADS, processors())


def spread(work: Callable[..., None], items: list[tuple[Any, ...]], threads: int) -> None:
    """Call `work` with every item, by several threads that end with the call."""
    shared = iter(items)

    def run() -> None:
        for item in shared:
            work(*item)

    if threads == 1 or len(items) < FEW:
        run()
        return
    with ThreadPoolExecutor(threads - 1, "weights") as pool:
        others = [pool.submit(run) for _ in range(threads - 1)]
        run()
        for other in others:
            other.result()


def checksum(bytes_N: Array, sums: Array | None = None) -> int:
    """Return the checksum of bytes whose number is a multiple of 8; `sums`: those of its blocks."""
    if sums is None:
        sums = new_sums(len(bytes_N))
        sum_blocks(bytes_N, sums)
    return summed(sums, bytes_N[len(sums) * BLOCK :])


def summed(sums: Array, rest_N: Array) -> int:
    """Return the checksum of bytes by the sums of their blocks, and the bytes after these."""
    return zlib.crc32(rest_N.data, zlib.crc32(sums.data))


def new_sums(size: int) -> Array:
    """Make room for the sums of `size` bytes."""
    return np.empty(size // BLOCK, np.int64)


def sum_blocks(bytes_N: Array, sums: Array) -> None:
    """Fill `sums` with those of the first blocks."""
    words_BN = bytes_N[: len(sums) * BLOCK].view(np.int64).reshape(-1, BLOCK // 8)
    np.sum(words_BN, axis=1, out=sums)


def chunks(size: int) -> Iterable[slice]:
    return (slice(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK))


def checksums(
    bytes_N: Array,
    entries: dict[str, dict[str, Any]],
    threads: int,
    known: dict[str, Array] | None = None,
) -> dict[str, int]:
    """Return the checksum of every tensor with the padding after it; `known`: finished sums."""
    sums = dict(known or {})
    regions = {name: bytes_N[region(entry)] for name, entry in entries.items()}
    work = []
    for name, region_N in regions.items():
        if name not in sums:
            sums[name] = new_sums(len(region_N))
            work += [(region_N, sums[name], chunk) for chunk in chunks(len(region_N))]
    spread(sum_chunk, work, threads)
    return {name: checksum(region_N, sums[name]) for name, region_N in regions.items()}


def sum_chunk(region_N: Array, sums: Array, chunk: slice) -> None:
    """Fill in the sums of one chunk of a region."""
    sum_blocks(region_N[chunk], sums[chunk.start // BLOCK : chunk.stop // BLOCK])


def region(entry: dict[str, Any]) -> slice:
    """Return the place of a tensor with the padding after it."""
    return slice(entry["offset"], aligned(entry["offset"] + nbytes(entry)))
