"""Bounded pool of experience without duplicates.

All entries are in memory and, through `Store`, on disk. Retrieval ranks entries by the cosine of
`when_to_use` and the task, then by their success rate. The pool uses neither a clock nor random
numbers: equal calls give equal pools.
"""

import heapq
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np

from actors.experience.embed import Embedder
from actors.experience.embedders import CountedEmbedder, EmbedFailed
from actors.experience.index import Near, VectorIndex, cosine_steps, least_cosine, rank
from actors.experience.pool_file import ExperienceEntry, Store
from actors.experience.successes import SuccessMemory
from actors.experience.templates import advice_of
from actors.failure_counts import FailureCounts

CANDIDATES = 128  # nearest entries that are ranked
MAX_ALIKE = 16  # entries with one advice for similar tasks whose texts are alike
TRIM_SHARE = 100  # trimming removes limit / TRIM_SHARE entries more, as each trim sorts all
COUNTED = ("added", "retired", "evicted", "purged")
UNGUIDED = 1000  # newest unguided members whose success entries are compared with
MAX_VECTORS = 4096  # embedded queries in memory
TOGETHER = 256  # entries that get the vectors of another embedder in one call

log = logging.getLogger(__name__)


class Item(NamedTuple):
    """Candidate for an entry. `teacher`: contributors of other groups, one a line, whose success it
    tells."""

    when_to_use: str
    content: str
    score: float
    state: str = ""
    teacher: str = ""


@dataclass(eq=False)
class ExperiencePool:
    """Pool of experience entries.

    `dedup`: an item is a duplicate if the cosines of both its fields reach this, unless it and the
    entry belong to different states, whose advice is alike only in its words. `per_source` and
    `capacity` limit the entries of one contributor and in all; the least useful are deleted. An
    entry is retired, that is never retrieved nor added again, if after `retire_uses` uses its
    smoothed success per use is less than `retire_utility` times the success rate of unguided
    members. Raise EmbedFailed if the entries on disk cannot be embedded.
    """

    store: Store
    embedder: Embedder
    _: KW_ONLY
    dedup: float
    capacity: int
    per_source: int
    retire_uses: int
    retire_utility: float
    failures: FailureCounts = field(default_factory=FailureCounts)
    counts: Counter[str] = field(default_factory=Counter, init=False)
    entries: dict[int, ExperienceEntry] = field(default_factory=dict, init=False)  # not retired

    def __post_init__(self) -> None:
        self._embedder = CountedEmbedder(self.embedder, self.failures)
        self._index = VectorIndex(self._embedder.dimensions)
        self._retired: dict[int, ExperienceEntry] = {}
        self._known: set[tuple[str, str, str]] = set()  # texts, also of retired entries
        self._sources: Counter[str] = Counter()
        self._unguided, self.unguided_rate = self.store.unguided()
        self._vectors: dict[str, np.ndarray] = {}  # of queries
        self._load()
        self.successes = SuccessMemory(self.store, self._embedder)

    def __len__(self) -> int:
        return len(self.entries)

    def retrieve(self, query: str, top_k: int, similarity: float) -> list[ExperienceEntry]:
        """Return the best entries for a task, at most one per state and one per content.

        Raise EmbedFailed.
        """
        return self.retrieve_all([query], top_k, similarity)[0]

    def retrieve_all(
        self,
        queries: list[str],
        top_k: int,
        similarity: float,
        states: Sequence[str] = (),
    ) -> list[list[ExperienceEntry]]:
        """Return the best entries for each of some tasks, by one search. Raise EmbedFailed.

        `states`: keys of the state of each, whose entries and those without a state are meant; ""
        for entries of any state. (): any for all.
        """
        if not queries:
            return []
        least = least_cosine(similarity)
        nears = self._index.search(self._embedded(queries), CANDIDATES, least)
        asked = zip(nears, states or [""] * len(queries), strict=True)
        return [self._best(near, top_k, similarity, state) for near, state in asked]

    def _best(self, near: Near, top_k: int, similarity: float, state: str) -> list[ExperienceEntry]:
        chosen: list[ExperienceEntry] = []
        states, contents = set[str](), set[str]()
        for entry in self._ranked(near, similarity):
            if len(chosen) == top_k:
                break
            elsewhere = state and entry.state not in ("", state)
            if elsewhere or (entry.state and entry.state in states) or entry.content in contents:
                continue
            states.add(entry.state)
            contents.add(entry.content)
            chosen.append(entry)
        return chosen

    def take_group(self, name: str) -> bool:
        """Register a group; False if it was contributed before."""
        return self.store.take_group(name)

    def add(self, items: Iterable[Item], source: str, trajectories: list[str]) -> int:
        """Add the items that are no duplicates and can be embedded; return their number."""
        before = self.counts["added"]
        for item in items:
            self.counts["items"] += 1
            if (item.when_to_use, item.state, item.content) in self._known:
                self.counts["duplicates"] += 1
                continue
            try:
                when, content = self._embedder.embed([item.when_to_use, item.content])
            except EmbedFailed:
                continue
            if self._similar(item, when, content):
                self.counts["duplicates"] += 1
                continue
            entry = ExperienceEntry(
                when_to_use=item.when_to_use,
                content=item.content,
                state=item.state,
                score=item.score,
                source=source,
                teacher=item.teacher,
                trajectories=trajectories,
                created=self.store.groups,
                when_vector=when,
                content_vector=content,
            )
            self.store.add(entry)
            self._publish(entry)
            self.counts["added"] += 1
        if self._sources[source] > self.per_source:
            own = [entry for entry in self.entries.values() if entry.source == source]
            self._trim(own, self.per_source)
        if len(self.entries) > self.capacity:
            self._trim(list(self.entries.values()), self.capacity)
        return self.counts["added"] - before

    def compare(self, successes: Iterable[bool]) -> None:
        """Count outcomes of unguided members of groups in which others were guided.

        Their running success rate tells what is reached without the entries on the same tasks.
        """
        for success in successes:
            self._unguided = min(self._unguided + 1, UNGUIDED)
            self.unguided_rate += (success - self.unguided_rate) / self._unguided
        self.store.set_unguided(self._unguided, self.unguided_rate)

    def feed_back(self, ids: Iterable[int], success: bool) -> None:
        """Record the outcome of an episode that these entries guided; skip deleted ones."""
        for number in ids:
            entry = self.entries.get(number)
            if entry is None:
                continue
            with self._index.reranked(entry):
                entry.uses += 1
                entry.utility += success
                entry.rate()
            self.counts["uses"] += 1
            self.counts["successes"] += success
            least = self.retire_utility * self.unguided_rate
            if entry.uses >= self.retire_uses and entry.worth < least:
                entry.retired = True
                self.counts["retired"] += 1
                self._withdraw(entry)
                self._retired[entry.id] = entry
                if len(self._retired) > self.capacity:
                    self._delete([next(iter(self._retired.values()))])
            self.store.update(entry)

    def purge(self, source: str) -> int:
        """Delete all that a source has contributed or taught, also on disk, where copies of damaged
        files go as a whole.

        Return the number of entries, retired ones included.
        """
        entries = (*self.entries.values(), *self._retired.values())
        gone = [one for one in entries if source in (one.source, *one.teacher.splitlines())]
        self._delete(gone)
        self.successes.purge(source)
        self.store.shrink()
        if copies := self.store.drop_copies():
            log.warning("%d copies of damaged files were deleted with what is purged", copies)
        self.counts["purged"] += len(gone)
        return len(gone)

    def renew(self, stage: int) -> None:
        """Empty the pool for a stage; what earlier ones still contribute is not meant for it."""
        self._delete([*self.entries.values(), *self._retired.values()])
        self.successes.clear()
        self.store.set_stage(stage)

    def commit(self) -> None:
        self.store.commit()

    def close(self) -> None:
        self.store.close()

    def counters(self) -> dict[str, float]:
        """Return totals and current sizes by metric name."""
        counts = self.counts
        values = {
            "pool_size": len(self.entries),
            "sources": len(self._sources),
            "solved": len(self.successes),
            "embed_failures": self._embedder.failed,
            "unguided_rate": self.unguided_rate,
            "dedup_share": counts["duplicates"] / max(1, counts["items"]),
            "use_success": counts["successes"] / max(1, counts["uses"]),
        }
        values |= {name: counts[name] for name in COUNTED}
        return {f"experience/{name}": float(value) for name, value in values.items()}

    def _load(self) -> None:
        made_by, entries = self.store.load()
        if made_by != self._embedder.name:
            for start in range(0, len(entries), TOGETHER):
                some = entries[start : start + TOGETHER]
                texts = [text for one in some for text in (one.when_to_use, one.content)]
                vectors = iter(self._embedder.embed(texts))
                for entry in some:
                    entry.when_vector, entry.content_vector = next(vectors), next(vectors)
            self.store.adopt(self._embedder.name, entries)
        for entry in entries:
            if entry.retired:
                self._retired[entry.id] = entry
                self._known.add((entry.when_to_use, entry.state, entry.content))
            else:
                self._publish(entry)

    def _ranked(self, near: Near, similarity: float) -> Iterator[ExperienceEntry]:
        """Yield entries of at least this cosine: the nearest first, then the most useful."""
        least = cosine_steps(similarity)
        for steps, equal in groupby(near, lambda pair: cosine_steps(pair[1])):
            if steps < least:
                return
            first, *others = (reversed(place) for place, _ in equal)
            yield from heapq.merge(first, *others, key=rank, reverse=True) if others else first

    def _embedded(self, queries: list[str]) -> np.ndarray:
        """Embed tasks as float32[n, d]; those of the last calls are cached."""
        new = [query for query in dict.fromkeys(queries) if query not in self._vectors]
        vectors = {query: self._vectors[query] for query in queries if query in self._vectors}
        vectors |= zip(new, self._embedder.embed(new), strict=True)
        self._vectors |= vectors
        for query in list(islice(self._vectors, max(0, len(self._vectors) - MAX_VECTORS))):
            del self._vectors[query]
        return np.stack([vectors[query] for query in queries])

    def _similar(self, item: Item, when: np.ndarray, content: np.ndarray) -> bool:
        """Return True if an entry in the index is a duplicate.

        Texts alike for different states are none, up to `MAX_ALIKE` with the same advice: states
        that never come again, such as observations with a clock, would fill the pool with one.
        """
        (near,) = self._index.search(when[None], CANDIDATES, self.dedup)
        entries = [entry for place, _ in near for entry in place]
        if not entries:
            return False
        cosines = np.stack([entry.content_vector for entry in entries]) @ content
        alike = [entries[at] for at in np.flatnonzero(cosines >= self.dedup)]
        if any(not item.state or one.state in ("", item.state) for one in alike):
            return True
        advice = advice_of(item.content, item.state)
        return sum(advice_of(one.content, one.state) == advice for one in alike) >= MAX_ALIKE

    def _trim(self, entries: list[ExperienceEntry], limit: int) -> None:
        """Delete the least useful of these entries, a few below the limit.

        An unused entry counts as one success in two uses, or as less where unguided members do
        worse: guided ones do as well there, so that entries in use would be deleted first. Where
        unguided members do better, the uses that count are older than their success.
        """
        prior = min(0.5, self.unguided_rate) if self._unguided else 0.5

        def usefulness(entry: ExperienceEntry) -> tuple[float, int, int]:
            return (entry.utility + 2 * prior) / (entry.uses + 2), -entry.uses, entry.id

        surplus = len(entries) - limit + limit // TRIM_SHARE
        gone = heapq.nsmallest(surplus, entries, key=usefulness)
        self.counts["evicted"] += len(gone)
        self._delete(gone)

    def _publish(self, entry: ExperienceEntry) -> None:
        self.entries[entry.id] = entry
        self._sources[entry.source] += 1
        self._known.add((entry.when_to_use, entry.state, entry.content))
        self._index.add(entry)

    def _withdraw(self, entry: ExperienceEntry) -> None:
        del self.entries[entry.id]
        self._sources -= Counter([entry.source])  # drops sources without entries
        self._index.remove(entry)

    def _delete(self, entries: list[ExperienceEntry]) -> None:
        for entry in entries:
            if self._retired.pop(entry.id, None) is None:
                self._withdraw(entry)
            self._known.discard((entry.when_to_use, entry.state, entry.content))
        self.store.remove(entries)
