"""Filters of candidates: a task needs a solution, must be new, and feasible when replayed."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np

from actors.experience.embed import Embedder, words_of
from actors.experience.embedders import EmbedFailed
from actors.questioning.action_replay import ReplayedEpisode
from actors.questioning.synthesize import Candidate
from evolver_async.buffer.tasks.stream import MAX_BYTES
from evolver_async.randomness import key
from evolver_async.schema import Task

MAX_MAPS = 4096  # with remembered tasks; the buffer knows the ids of all tasks

# (task, actions, dynamics seed) → replay
Play = Callable[[Task, list[str], int], Awaitable[ReplayedEpisode]]


@dataclass
class _Map:
    """Tasks with the same initial state."""

    ids: set[str] = field(default_factory=set)
    queries: list[str] = field(default_factory=list)
    words: list[set[str]] = field(default_factory=list)
    vectors: list[np.ndarray] = field(default_factory=list)


@dataclass(eq=False)
class KnownTasks:
    """Tasks that this actor has accepted, by the task whose exploration they come from.

    Two tasks have the same initial state if the explorations that they come from began with the
    same content, or had the same number and parameters. They are then duplicates if their queries
    reach `jaccard` (share of common words) or `similarity` (cosine of their vectors by `embedder`).
    """

    jaccard: float
    similarity: float
    embedder: Embedder
    _maps: OrderedDict[int, _Map] = field(default_factory=OrderedDict)  # by content or place
    _contents: OrderedDict[int, int] = field(default_factory=OrderedDict)  # by place

    def explored(self, task: Task, content: int) -> None:
        """Note the hash of the content with which an exploration of `task` began.

        Several tasks may have one content. A task keeps its first one: chance may change what is
        seen first.
        """
        self._contents.setdefault(_place(task), content)
        if len(self._contents) > MAX_MAPS:
            self._contents.popitem(last=False)

    def queries(self, explored: Task) -> list[str]:
        """Return the queries of the tasks with the initial state of `explored`, oldest first."""
        return list(self._of(explored).queries)

    def objection(self, task: Task, explored: Task) -> str | None:
        """Return why a task is rejected (empty, large, known, lexical, semantic), or None."""
        if not task.reference or not all(task.reference):
            return "empty"
        if large(task):
            return "large"
        others = self._of(explored)
        if task.task_id in others.ids:
            return "known"
        if not task.query:
            return None
        words = _vocabulary(task.query)
        if not words:
            return "empty"
        if any(jaccard(words, other) >= self.jaccard for other in others.words):
            return "lexical"
        try:
            vector = self.embedder.embed([task.query])[0]
        except EmbedFailed:  # its words are new
            return None
        if any(float(vector @ other) >= self.similarity for other in others.vectors):
            return "semantic"
        return None

    def add(self, task: Task, explored: Task) -> None:
        others = self._of(explored)
        others.ids.add(task.task_id)
        if task.query:
            others.queries.append(task.query)
            others.words.append(_vocabulary(task.query))
            with suppress(EmbedFailed):
                others.vectors.append(self.embedder.embed([task.query])[0])

    def _of(self, explored: Task) -> _Map:
        place = _place(explored)
        beginning = self._contents.get(place, place)
        found = self._maps.setdefault(beginning, _Map())
        self._maps.move_to_end(beginning)
        if len(self._maps) > MAX_MAPS:
            self._maps.popitem(last=False)
        return found


def _vocabulary(query: str) -> set[str]:
    """Return the different words of a query, without punctuation."""
    return {word for word in words_of(query) if word[0].isalnum() or len(word) > 1}


def _place(task: Task) -> int:
    """Hash what gives a task its initial state; lines of a file can differ in params alone."""
    params = msgspec.json.encode(task.params, order="deterministic").decode()
    return key(0, "place", task.env, task.split, task.map_seed, params)


def large(task: Task) -> bool:
    """Return True for a task for which the buffer refuses the whole offer."""
    return len(msgspec.msgpack.encode(task)) > MAX_BYTES


def jaccard(left: set[str], right: set[str]) -> float:
    """Return the Jaccard similarity of two sets."""
    both = left | right
    return len(left & right) / len(both) if both else 1.0


async def feasible(
    made: Candidate, play: Play, checked: bool, replays: int, kept: int
) -> ReplayedEpisode | None:
    """Return the replay of a reference that solves the task in fresh instances, else None.

    It must do so with the exploration's dynamics seed and in `kept` of `replays` instances with
    other seeds. `checked`: the environment checks success; otherwise all actions of the reference
    must at least be valid within one episode, and none a call that fails.
    """
    task, reference = made.task, made.task.reference or []

    def works(played: ReplayedEpisode) -> bool:
        whole = not played.refused and len(played.actions) == len(reference)
        failed = any(step.info.tool_error for step in played.steps)
        return whole and (played.success if checked else not failed)

    first = await play(task, reference, made.dynamics_seed)
    if not works(first):
        return None
    seeds = [key(made.dynamics_seed, "replay", number) for number in range(replays)]
    worked = 0
    for left, seed in zip(range(replays, 0, -1), seeds, strict=True):
        if worked >= kept or worked + left < kept:
            break
        worked += works(await play(task, reference, seed))
    return first if worked >= kept else None
