"""Vector index of the experience pool: exact search by inner product, many questions at once.

Entries with the same vector, as those of one task have, share a place in a flat faiss index, so
that the search costs as much as there are different vectors. The nearest places of a question are
cached; when it is asked again, only places that were added since then are compared. On a CPU the
products of all questions come from one matrix product, which takes an eighth of the time of faiss's
own search; on a GPU faiss searches.
"""

import functools
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np

MAX_REMOVED = 256  # places without entries before the index is rebuilt
MAX_CACHED = 4096  # questions
BATCH = 64  # questions in one matrix product
PARTS = 64  # of the places, whose maxima bound the search for the nearest ones
GPU_BYTES = 64 << 20
COSINE_STEPS = 1000  # resolution at which cosines are compared

Near = Iterator[tuple[int, float]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Nearest:
    """Nearest places of a question among the first `seen`, nearest first, and their products."""

    seen: int
    places: np.ndarray
    products: np.ndarray


class VectorIndex:
    """Vectors by number, searched by inner product; on a GPU if faiss finds one."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self._flat = _flat(dimensions)
        self._numbers: list[dict[int, None]] = []  # by place; none where all were removed
        self._digests: list[bytes] = []  # by place
        self._places: dict[int, int] = {}
        self._place_of: dict[bytes, int] = {}  # by digest of the vector
        self._hidden = 0  # places without numbers
        self._cached: OrderedDict[bytes, _Nearest] = OrderedDict()

    def add(self, number: int, vector: np.ndarray) -> None:
        digest = _digest(vector)
        place = self._place_of.setdefault(digest, len(self._numbers))
        if place == len(self._numbers):
            self._numbers.append({})
            self._digests.append(digest)
            self._flat.add(vector[None])
        elif not self._numbers[place]:
            self._hidden -= 1
        self._numbers[place][number] = None
        self._places[number] = place

    def remove(self, number: int) -> None:
        place = self._places.pop(number)
        del self._numbers[place][number]
        if not self._numbers[place]:
            self._hidden += 1
            if self._hidden > MAX_REMOVED:
                self._rebuild()

    def search(self, vectors_QD: np.ndarray, count: int) -> list[Near]:
        """Return the nearest `count` numbers of each question, nearest first, with their products.

        All numbers at the last one's place are returned, too: nothing tells which are nearer. The
        iterators are valid until the next change, and those that are not used cost little.
        """
        names = [_digest(vector) for vector in vectors_QD]
        asked = dict(zip(names, vectors_QD, strict=True))
        new = [name for name, vector in asked.items() if not self._knows(name, vector, count)]
        for start in range(0, len(new), BATCH):
            part = new[start : start + BATCH]
            self._search_new(part, np.stack([asked[name] for name in part]), count)
        found = [self._expanded(self._cached[name], count) for name in names]
        while len(self._cached) > MAX_CACHED:
            self._cached.popitem(last=False)
        return found

    def _knows(self, name: bytes, vector: np.ndarray, count: int) -> bool:
        """Compare a question in the cache with new places; False if that is not enough."""
        if (nearest := self._cached.get(name)) is None:
            return False
        self._cached.move_to_end(name)
        if nearest.seen < len(self._numbers):
            kept = max(len(nearest.places), count)
            nearest = self._cached[name] = self._extended(nearest, vector, kept)
        if len(nearest.places) == len(self._numbers):
            return True
        found = 0
        for place in nearest.places.tolist():
            found += len(self._numbers[place])
            if found >= count:
                return True
        return False

    def _extended(self, nearest: _Nearest, vector: np.ndarray, count: int) -> _Nearest:
        added = self._flat.reconstruct_n(nearest.seen, len(self._numbers) - nearest.seen)
        places = np.concatenate([nearest.places, np.arange(nearest.seen, len(self._numbers))])
        products = np.concatenate([nearest.products, added @ vector])
        order = np.argsort(-products, kind="stable")[:count]
        return _Nearest(len(self._numbers), places[order], products[order])

    def _search_new(self, names: list[bytes], vectors_QD: np.ndarray, count: int) -> None:
        """Put the nearest places of these questions into the cache."""
        size = len(self._numbers)
        none = [np.zeros(0, np.int64)] * len(names)
        found = self._nearest(vectors_QD, min(count + self._hidden, size)) if size else (none, none)
        for name, places, products in zip(names, *found, strict=True):
            self._cached[name] = _Nearest(size, places, products)

    def _nearest(self, vectors_QD: np.ndarray, count: int) -> tuple[Any, Any]:
        """Return the nearest `count` places of each question and their products."""
        if not isinstance(self._flat, faiss.IndexFlat):
            products_QC, places_QC = self._flat.search(vectors_QD, count)
            return places_QC, products_QC
        size = len(self._numbers)
        stored = faiss.rev_swig_ptr(self._flat.get_xb(), size * self._dimensions)
        products_QN = vectors_QD @ stored.reshape(size, self._dimensions).T
        places = [_largest(products_N, count) for products_N in products_QN]
        return places, [row[best] for row, best in zip(products_QN, places, strict=True)]

    def _expanded(self, nearest: _Nearest, count: int) -> Near:
        """Yield the numbers at these places up to `count`, and all of the last one's place."""
        found = 0
        for place, product in zip(nearest.places.tolist(), nearest.products.tolist(), strict=True):
            if found >= count:
                break
            found += len(self._numbers[place])
            for number in self._numbers[place]:
                yield number, product

    def _rebuild(self) -> None:
        kept = [place for place, numbers in enumerate(self._numbers) if numbers]
        vectors = self._flat.reconstruct_n(0, len(self._numbers))[kept]
        self._numbers = [self._numbers[place] for place in kept]
        self._digests = [self._digests[place] for place in kept]
        self._place_of = {digest: place for place, digest in enumerate(self._digests)}
        self._places = {
            number: place for place, numbers in enumerate(self._numbers) for number in numbers
        }
        self._hidden = 0
        self._cached.clear()
        self._flat = _flat(self._dimensions)
        if kept:
            self._flat.add(vectors)


def cosine_steps(cosine: float) -> int:
    """Round a cosine to the resolution at which cosines are compared."""
    return round(COSINE_STEPS * cosine)


def _largest(products_N: np.ndarray, count: int) -> np.ndarray:
    """Return the places of the largest `count` products, the largest first.

    The maxima of parts give a lower bound of the last one, so that few products are sorted.
    """
    parts = len(products_N) // PARTS
    chosen = np.arange(len(products_N))
    if parts > count:
        maxima = products_N[: parts * PARTS].reshape(PARTS, parts).max(0)
        bound = np.partition(maxima, parts - count)[parts - count]
        chosen = np.flatnonzero(products_N >= bound)
    elif count < len(products_N):
        chosen = np.argpartition(products_N, -count)[-count:]
    order = np.argsort(-products_N[chosen], kind="stable")[:count]
    return chosen[order]


def _digest(vector: np.ndarray) -> bytes:
    return hashlib.blake2b(vector.tobytes(), digest_size=16).digest()


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
