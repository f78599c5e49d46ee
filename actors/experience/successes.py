"""Memory of solved groups, from which groups that failed throughout learn.

A success teaches a failure only if their queries are similar, as entries guide only similar tasks:
the names of states mean nothing in another task. The memory uses neither a clock nor random
numbers, and the store holds it, so that a restart changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from actors.experience.embed import Embedder
from actors.experience.embedders import EmbedFailed
from actors.experience.index import cosine_steps
from actors.experience.pool_file import Store
from evolver_async.wire.transcripts import Transcript

CAPACITY = 256  # queries, each with its newest solved group
EPISODES = 4  # of a solved group

_decoder = msgspec.msgpack.Decoder(list[Transcript])


@dataclass(frozen=True, eq=False)
class SolvedGroup:
    """Successful episodes of one group, at most `EPISODES`, those with the largest reward first."""

    source: str
    query: str
    episodes: list[Transcript]


class SuccessMemory:
    """Newest solved group of each of the last `CAPACITY` queries that could be embedded."""

    def __init__(self, store: Store, embedder: Embedder) -> None:
        self._store = store
        self._embedder = embedder
        groups = [
            SolvedGroup(source, query, _decoder.decode(episodes))
            for source, query, episodes in store.load_solved()
        ]
        vectors = embedder.embed([group.query for group in groups]) if groups else []
        self._groups: dict[str, tuple[SolvedGroup, np.ndarray]] = {
            group.query: (group, vector) for group, vector in zip(groups, vectors, strict=True)
        }

    def __len__(self) -> int:
        return len(self._groups)

    def remember(self, source: str, query: str, episodes: Sequence[Transcript]) -> None:
        """Take in the successes among a group's episodes, if there are any."""
        solved = sorted(
            (episode for episode in episodes if episode.success),
            key=lambda episode: (-episode.reward, episode.trajectory_id),
        )
        if not solved:
            return
        group = SolvedGroup(source, query, solved[:EPISODES])
        _, vector = self._groups.get(query, (None, None))
        if vector is None:
            try:
                vector = self._embedder.embed([query])[0]
            except EmbedFailed:
                return
        self._groups.pop(query, None)
        self._groups[query] = group, vector
        self._store.put_solved(source, query, msgspec.msgpack.encode(group.episodes))
        if len(self._groups) > CAPACITY:
            self._forget([next(iter(self._groups))])

    def similar(self, query: str, similarity: float) -> list[SolvedGroup]:
        """Return the groups whose queries have at least this cosine with `query`, nearest first.

        Of equally near ones the newest comes first. [] for a query that cannot be embedded.
        """
        if not self._groups:
            return []
        try:
            vector = self._embedder.embed([query])[0]
        except EmbedFailed:
            return []
        groups, vectors = zip(*self._groups.values(), strict=True)
        cosines = np.stack(vectors) @ vector
        near = [
            (cosine_steps(cosine), number, group)
            for number, (cosine, group) in enumerate(zip(cosines.tolist(), groups, strict=True))
            if cosine_steps(cosine) >= cosine_steps(similarity)
        ]
        return [group for _, _, group in sorted(near, key=lambda one: one[:2], reverse=True)]

    def purge(self, source: str) -> None:
        """Delete the groups of a source, also on disk."""
        gone = [query for query, (group, _) in self._groups.items() if group.source == source]
        self._forget(gone)

    def clear(self) -> None:
        """Delete all groups."""
        self._forget(list(self._groups))

    def _forget(self, queries: list[str]) -> None:
        for query in queries:
            del self._groups[query]
        self._store.remove_solved(queries)
