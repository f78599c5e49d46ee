"""Vector index of the experience pool: exact search by inner product with faiss."""

import functools
import logging
from typing import Any

import faiss
import numpy as np

MAX_REMOVED = 64  # removed entries in the index before it is rebuilt
GPU_BYTES = 64 << 20
COSINE_STEPS = 1000  # resolution at which cosines are compared

log = logging.getLogger(__name__)


class VectorIndex:
    """Vectors by number, searched by inner product; on a GPU if faiss finds one."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self._flat = _flat(dimensions)
        self._numbers: list[int] = []  # by position in the flat index; -1 if removed
        self._places: dict[int, int] = {}

    def add(self, number: int, vector: np.ndarray) -> None:
        self._places[number] = len(self._numbers)
        self._numbers.append(number)
        self._flat.add(vector[None])

    def remove(self, number: int) -> None:
        self._numbers[self._places.pop(number)] = -1
        if len(self._numbers) - len(self._places) > MAX_REMOVED:
            self._rebuild()

    def search(self, vector: np.ndarray, count: int) -> list[tuple[int, float]]:
        """Return the nearest `count` numbers and their inner products, nearest first."""
        hidden = len(self._numbers) - len(self._places)
        count = min(count, len(self._places))
        if not count:
            return []
        products, places = self._flat.search(vector[None], count + hidden)
        found = [
            (self._numbers[place], float(product))
            for product, place in zip(products[0].tolist(), places[0].tolist(), strict=True)
            if self._numbers[place] >= 0
        ]
        return found[:count]

    def _rebuild(self) -> None:
        kept = [place for place, number in enumerate(self._numbers) if number >= 0]
        vectors = self._flat.reconstruct_n(0, len(self._numbers))[kept]
        self._numbers = [self._numbers[place] for place in kept]
        self._places = {number: place for place, number in enumerate(self._numbers)}
        self._flat = _flat(self._dimensions)
        if kept:
            self._flat.add(vectors)


def cosine_steps(cosine: float) -> int:
    """Round a cosine to the resolution at which cosines are compared."""
    return round(COSINE_STEPS * cosine)


def _flat(dimensions: int) -> Any:
    flat = faiss.IndexFlatIP(dimensions)
    if faiss.get_num_gpus() == 0:
        return flat
    try:
        return faiss.index_cpu_to_gpu(_gpu(), 0, flat)
    except RuntimeError as error:
        log.warning("faiss searches the experience without the GPU: %s", error)
        return flat


@functools.cache
def _gpu() -> Any:
    """Reserve GPU memory for faiss, once per process; little, as an engine may share the GPU."""
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(GPU_BYTES)
    return resources
