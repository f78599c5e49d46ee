"""Vector index of the experience pool: exact search by inner product, many questions at once.

Entries with the same vector, as those of one task have, share a row, so that a search costs as much
as there are different vectors (`vectors.py`). The entries of a row are kept in order, so that only
those that are read cost anything. The nearest rows of a question are cached; when it is asked
again, only rows that have changed since then are compared. A search finds the nearest `FIRST` rows,
and goes on only if results are read further.
"""

import hashlib
from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from actors.experience.gpu_vectors import vector_table
from actors.experience.pool_file import ExperienceEntry

FIRST = 32  # rows that a search finds at first
MAX_CACHED = 4096  # questions
MAX_CHANGES = 4096  # newest changes that questions in the cache are compared with
KEPT = 256  # rows of a question in the cache
BATCH = 64  # questions in one matrix product
COSINE_STEPS = 1000  # resolution at which cosines are compared

Place = list[ExperienceEntry]  # entries with the same vector, the most useful last
Near = Iterator[tuple[Place, float]]


@dataclass
class _Nearest:
    """Nearest rows of a question after `seen` changes, nearest first.

    No other row has a product larger than `bound`.
    """

    vector: np.ndarray
    seen: int
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    products: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    bound: float = np.inf

    def lacks(self, count: int, least: float) -> bool:
        """True if other rows can be among the nearest `count` with at least this product."""
        return len(self.rows) < count and self.bound > least


class VectorIndex:
    """Entries by their `when_vector`, searched by inner product; on a GPU if faiss finds one."""

    def __init__(self, dimensions: int) -> None:
        self._table = vector_table(dimensions)
        self._places: list[Place] = []  # by row; those of free rows are empty
        self._rows: dict[bytes, int] = {}  # by digest of the vector
        self._digests: dict[int, bytes] = {}  # by id of the entry
        self._changes: list[int] = []  # rows that got or lost their vector, the newest last
        self._forgotten = 0  # changes before those
        self._cached: OrderedDict[bytes, _Nearest] = OrderedDict()

    def add(self, entry: ExperienceEntry) -> None:
        digest = self._digests[entry.id] = _digest(entry.when_vector)
        row = self._rows.get(digest)
        if row is not None:
            insort(self._places[row], entry, key=rank)
            return
        row = self._rows[digest] = self._table.put(entry.when_vector)
        self._places[row : row + 1] = [[entry]]
        self._change(row)

    def remove(self, entry: ExperienceEntry) -> None:
        digest = self._digests.pop(entry.id)
        row = self._rows[digest]
        _take_out(self._places[row], entry)
        if not self._places[row]:
            del self._rows[digest]
            self._table.free(row)
            self._change(row)

    @contextmanager
    def reranked(self, entry: ExperienceEntry) -> Iterator[None]:
        """Let the usefulness of an entry change."""
        place = self._places[self._rows[self._digests[entry.id]]]
        _take_out(place, entry)
        yield
        insort(place, entry, key=rank)

    def search(self, vectors_QD: np.ndarray, count: int, least: float = -np.inf) -> list[Near]:
        """Return the nearest places of each question, nearest first, with their products.

        They are those of the nearest `count` entries with products of at least `least`, whole:
        nothing tells which entries at a place are nearer. The iterators are valid until the next
        change, and those that are not used cost little.
        """
        if not self._rows:
            return [iter(()) for _ in vectors_QD]
        least = float(np.float32(least))
        names = [_digest(vector) for vector in vectors_QD]
        vectors = dict(zip(names, vectors_QD, strict=True))
        self._compare_changes([self._recall(name, vector) for name, vector in vectors.items()])
        asked = [self._cached[name] for name in vectors]
        self._find(asked, min(FIRST, count), least)
        answers = [self._near(self._cached[name], asked, count, least) for name in names]
        while len(self._cached) > MAX_CACHED:
            self._cached.popitem(last=False)
        return answers

    def _change(self, row: int) -> None:
        self._changes.append(row)
        if len(self._changes) > 2 * MAX_CHANGES:
            del self._changes[:MAX_CHANGES]
            self._forgotten += MAX_CHANGES

    def _recall(self, name: bytes, vector: np.ndarray) -> _Nearest:
        """Return what the cache knows of a question, or nothing, as the newest in the cache."""
        nearest = self._cached.pop(name, None)
        if nearest is None or nearest.seen < self._forgotten:
            nearest = _Nearest(vector, self._forgotten + len(self._changes))
        self._cached[name] = nearest
        return nearest

    def _find(self, asked: list[_Nearest], count: int, least: float) -> None:
        """Search for the nearest `count` rows of the questions that lack some of them."""
        lacking = [nearest for nearest in asked if nearest.lacks(count, least)]
        for start in range(0, len(lacking), BATCH):
            part = lacking[start : start + BATCH]
            vectors_QD = np.stack([nearest.vector for nearest in part])
            found = self._table.nearest(vectors_QD, count, least)
            for nearest, (rows, products, bound) in zip(part, found, strict=True):
                nearest.rows, nearest.products, nearest.bound = rows, products, bound

    def _near(self, nearest: _Nearest, asked: list[_Nearest], count: int, least: float) -> Near:
        """Yield places up to `count` entries; if the known rows have too few, search for all."""
        given, before = 0, set[int]()
        while True:
            for row, product in zip(nearest.rows.tolist(), nearest.products.tolist(), strict=True):
                if given >= count or product < least:
                    return
                if row not in before:
                    before.add(row)
                    given += len(self._places[row])
                    yield self._places[row], product
            if given >= count or not nearest.lacks(count, least):
                return
            self._find(asked, count, least)

    def _compare_changes(self, asked: list[_Nearest]) -> None:
        """Compare questions with the rows that have changed since they were compared last."""
        latest = self._forgotten + len(self._changes)
        behind: defaultdict[int, list[_Nearest]] = defaultdict(list)
        for nearest in asked:
            if nearest.seen < latest:
                behind[nearest.seen].append(nearest)
        for seen, group in behind.items():
            self._compare(group, sorted({*self._changes[seen - self._forgotten :]}))
            for nearest in group:
                nearest.seen = latest

    def _compare(self, group: list[_Nearest], changed: list[int]) -> None:
        """Forget what is known of some rows; add those that are near enough."""
        stale_R = np.zeros(len(self._table), bool)
        stale_R[changed] = True
        rows_C = np.array([row for row in changed if self._places[row]], np.int64)
        products_CQ = self._table.products(rows_C, np.stack([one.vector for one in group]))
        near_QC = (products_CQ >= np.array([one.bound for one in group], np.float32)).T
        for question, (nearest, near_C) in enumerate(zip(group, near_QC, strict=True)):
            known = ~stale_R[nearest.rows]
            if known.all() and not near_C.any():
                continue
            rows = np.concatenate([nearest.rows[known], rows_C[near_C]])
            products = np.concatenate([nearest.products[known], products_CQ[near_C, question]])
            order = np.argsort(-products, kind="stable")
            if len(order) > KEPT:
                nearest.bound = float(products[order[KEPT]])
            nearest.rows, nearest.products = rows[order[:KEPT]], products[order[:KEPT]]


def rank(entry: ExperienceEntry) -> tuple[float, int]:
    """Return the order of entries that are equally near: the most useful, then the newest last."""
    return entry.worth, entry.id


def _take_out(place: Place, entry: ExperienceEntry) -> None:
    del place[bisect_left(place, rank(entry), key=rank)]


def cosine_steps(cosine: float) -> int:
    """Round a cosine to the resolution at which cosines are compared."""
    return round(COSINE_STEPS * cosine)


def least_cosine(similarity: float) -> float:
    """Return a cosine below all that round to `similarity` or more."""
    return (cosine_steps(similarity) - 1) / COSINE_STEPS


def _digest(vector: np.ndarray) -> bytes:
    return hashlib.blake2b(vector.tobytes(), digest_size=16).digest()
