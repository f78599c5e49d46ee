"""The pool of experience: found by what it is good for, without copies, bounded, the useless gone.

Everything is in memory and, through `Store`, on disk. An entry is found by the cosine of its
`when_to_use` with a task; of those equally near, the one that has helped more often comes first. No
clock and no chance in here: the same calls give the same pool.
"""

import functools
import heapq
import importlib.util
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from actors.experience.embed import Embedder
from actors.experience.store import Entry, Store

CANDIDATES = 128  # nearest entries that are looked at more closely
STEPS = 1000  # cosines that differ by less than one of so many steps are equal
REMOVED = 64  # entries that an index only hides before it is made anew
TRIMMED = 100  # of so many entries over a limit one more goes, so that not every new one sorts all
FOUND = 1024  # answers kept until the pool changes
GPU_BYTES = 64 << 20

log = logging.getLogger(__name__)


class Item(NamedTuple):
    """What could become an entry."""

    when_to_use: str
    content: str
    score: float
    state: str = ""


class Pool:
    """`dedup`: the cosine of both fields from which an item is there already. `per_source` entries
    of one contributor and `capacity` in all: the least useful go. After `retire_uses` uses an entry
    with less than `retire_utility` success per use is retired: found no more, nor learned again."""

    def __init__(
        self,
        store: Store,
        embedder: Embedder,
        *,
        dedup: float,
        capacity: int,
        per_source: int,
        retire_uses: int,
        retire_utility: float,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.entries: dict[int, Entry] = {}  # those that can be found
        self._store = store
        self._embedder = embedder
        self._dedup = dedup
        self._capacity = capacity
        self._per_source = per_source
        self._retire_uses = retire_uses
        self._retire_utility = retire_utility
        self._index = Index(embedder.dimensions)
        self._retired: dict[int, Entry] = {}
        self._known: set[tuple[str, str]] = set()  # texts, retired ones too
        self._sources: Counter[str] = Counter()
        self._found: dict[str, list[tuple[int, Entry]]] = {}
        self._load()

    def __len__(self) -> int:
        return len(self.entries)

    def retrieve(self, query: str, top_k: int, similarity: float) -> list[Entry]:
        """The best entries for a task, at most one about each state."""
        self.counts["retrievals"] += 1
        found = self._found.get(query)
        if found is None:
            near = self._index.search(self._embedder.embed([query])[0], CANDIDATES)
            found = [(round(STEPS * cosine), self.entries[number]) for number, cosine in near]
            found.sort(key=lambda pair: (-pair[0], -pair[1].worth, -pair[1].id))
            if len(self._found) >= FOUND:
                self._found.clear()
            self._found[query] = found
        chosen: list[Entry] = []
        states: set[tuple[str, str]] = set()
        for steps, entry in found:
            place = entry.when_to_use, entry.state
            if steps < round(STEPS * similarity) or len(chosen) == top_k:
                break
            if entry.state and place in states:
                continue
            states.add(place)
            chosen.append(entry)
        self.counts["empty"] += not chosen
        return chosen

    def take_group(self, name: str) -> bool:
        """Whether this group is contributed for the first time."""
        return self._store.take_group(name)

    def add(self, items: Iterable[Item], source: str, trajectories: list[str]) -> int:
        """Take in what is new; returns how many entries that made."""
        before = self.counts["added"]
        for item in items:
            self.counts["items"] += 1
            if (item.when_to_use, item.content) in self._known:
                self.counts["duplicates"] += 1
                continue
            when, content = self._embedder.embed([item.when_to_use, item.content])
            if self._similar(when, content):
                self.counts["duplicates"] += 1
                continue
            entry = Entry(
                when_to_use=item.when_to_use,
                content=item.content,
                state=item.state,
                score=item.score,
                source=source,
                trajectories=trajectories,
                created=self._store.groups,
                when_vector=when,
                content_vector=content,
            )
            self._store.add(entry)
            self._show(entry)
            self.counts["added"] += 1
        if self._sources[source] > self._per_source:
            own = [entry for entry in self.entries.values() if entry.source == source]
            self._trim(own, self._per_source)
        if len(self.entries) > self._capacity:
            self._trim(list(self.entries.values()), self._capacity)
        return self.counts["added"] - before

    def feed_back(self, ids: Iterable[int], success: bool) -> None:
        """What became of an episode that these entries guided; who is gone meanwhile is skipped."""
        for number in ids:
            entry = self.entries.get(number)
            if entry is None:
                continue
            self._found.clear()
            entry.uses += 1
            entry.utility += success
            self.counts["uses"] += 1
            self.counts["successes"] += success
            entry.rate()
            if (
                entry.uses >= self._retire_uses
                and entry.utility < self._retire_utility * entry.uses
            ):
                entry.retired = True
                self.counts["retired"] += 1
                self._hide(entry)
                self._retired[entry.id] = entry
                if len(self._retired) > self._capacity:
                    self._forget([next(iter(self._retired.values()))])
            self._store.update(entry)

    def purge(self, source: str) -> int:
        """Delete whatever a source has contributed, also from the disk; returns how many entries
        that was, retired ones included."""
        gone = [
            entry
            for entry in (*self.entries.values(), *self._retired.values())
            if entry.source == source
        ]
        self._forget(gone)
        self._store.shrink()
        self.counts["purged"] += len(gone)
        return len(gone)

    def commit(self) -> None:
        self._store.commit()

    def close(self) -> None:
        self._store.close()

    def counters(self) -> dict[str, float]:
        """Totals and what is the case now, by metric name."""
        counts = self.counts
        return {
            "experience/pool_size": float(len(self.entries)),
            "experience/sources": float(len(self._sources)),
            "experience/dedup_share": counts["duplicates"] / max(1, counts["items"]),
            "experience/use_success": counts["successes"] / max(1, counts["uses"]),
            **{
                f"experience/{name}": float(counts[name])
                for name in ("added", "retired", "evicted", "purged", "retrievals", "empty")
            },
        }

    def _load(self) -> None:
        made_by, entries = self._store.load()
        if made_by != self._embedder.name:
            for entry in entries:
                texts = [entry.when_to_use, entry.content]
                entry.when_vector, entry.content_vector = self._embedder.embed(texts)
            self._store.adopt(self._embedder.name, entries)
        for entry in entries:
            if entry.retired:
                self._retired[entry.id] = entry
                self._known.add((entry.when_to_use, entry.content))
            else:
                self._show(entry)

    def _similar(self, when: np.ndarray, content: np.ndarray) -> bool:
        """Whether an entry that can be found says the same about the same."""
        return any(
            cosine >= self._dedup and self.entries[number].content_vector @ content >= self._dedup
            for number, cosine in self._index.search(when, CANDIDATES)
        )

    def _trim(self, entries: list[Entry], limit: int) -> None:
        """Delete the least useful of these, so many that a few more find room."""
        surplus = len(entries) - limit + limit // TRIMMED
        gone = heapq.nsmallest(surplus, entries, key=lambda entry: (entry.worth, entry.id))
        self.counts["evicted"] += len(gone)
        self._forget(gone)

    def _show(self, entry: Entry) -> None:
        self._found.clear()
        self.entries[entry.id] = entry
        self._sources[entry.source] += 1
        self._known.add((entry.when_to_use, entry.content))
        self._index.add(entry.id, entry.when_vector)

    def _hide(self, entry: Entry) -> None:
        self._found.clear()
        del self.entries[entry.id]
        self._sources -= Counter([entry.source])  # drops who has none left
        self._index.remove(entry.id)

    def _forget(self, entries: list[Entry]) -> None:
        for entry in entries:
            if self._retired.pop(entry.id, None) is None:
                self._hide(entry)
            self._known.discard((entry.when_to_use, entry.content))
        self._store.remove(entries)


class Index:
    """Vectors by number, found by inner product: with faiss where it is installed, on a GPU where
    it finds one, else with numpy."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self._flat = _flat(dimensions)
        self._numbers: list[int] = []  # by position in the flat index; -1 for one that is removed
        self._places: dict[int, int] = {}

    def add(self, number: int, vector: np.ndarray) -> None:
        self._places[number] = len(self._numbers)
        self._numbers.append(number)
        self._flat.add(vector[None])

    def remove(self, number: int) -> None:
        self._numbers[self._places.pop(number)] = -1
        if len(self._numbers) - len(self._places) > REMOVED:
            self._rebuild()

    def search(self, vector: np.ndarray, count: int) -> list[tuple[int, float]]:
        """The nearest `count` numbers and their inner products, nearest first."""
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


class Rows:
    """What `Index` uses of faiss's flat index, in numpy."""

    def __init__(self, dimensions: int) -> None:
        self._rows = np.empty((64, dimensions), np.float32)
        self._count = 0

    def add(self, vectors: np.ndarray) -> None:
        needed = self._count + len(vectors)
        if needed > len(self._rows):
            grown = np.empty((2 * needed, self._rows.shape[1]), np.float32)
            grown[: self._count] = self._rows[: self._count]
            self._rows = grown
        self._rows[self._count : needed] = vectors
        self._count = needed

    def search(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        products = vectors @ self._rows[: self._count].T
        places = np.argsort(-products, axis=1, kind="stable")[:, :count]
        return np.take_along_axis(products, places, axis=1), places

    def reconstruct_n(self, first: int, count: int) -> np.ndarray:
        return self._rows[first : first + count]


def _flat(dimensions: int) -> Any:
    if importlib.util.find_spec("faiss") is None:
        return Rows(dimensions)
    import faiss

    flat = faiss.IndexFlatIP(dimensions)
    if faiss.get_num_gpus() == 0:
        return flat
    try:
        return faiss.index_cpu_to_gpu(_gpu(), 0, flat)
    except RuntimeError as error:
        log.warning("experience is searched without the GPU: %s", error)
        return flat


@functools.cache
def _gpu() -> Any:
    """What faiss needs of the GPU, once a process, and little of it: an engine lives there too."""
    import faiss

    resources = faiss.StandardGpuResources()
    resources.setTempMemory(GPU_BYTES)
    return resources
