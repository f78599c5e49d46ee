"""Which candidates become tasks: with a solution, not known, and feasible when played again."""

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from actors.experience.embed import embed
from actors.questioning.replay import Played
from actors.questioning.synthesize import Candidate
from evolver_async.randomness import key
from evolver_async.schema import Task

MAPS = 4096  # of which the known tasks are remembered; the buffer knows the ids of all
WORD = re.compile(r"\w+")

Play = Callable[[Task, list[str], int], Awaitable[Played]]  # a task, actions, a dynamics seed


@dataclass
class _Map:
    """The tasks that begin in the same way."""

    ids: set[str] = field(default_factory=set)
    queries: list[str] = field(default_factory=list)
    words: list[set[str]] = field(default_factory=list)
    vectors: list[np.ndarray] = field(default_factory=list)


class Known:
    """The tasks that this actor has accepted. `jaccard`, `similarity`: from which share of common
    words, from which cosine, two queries are the same task where they begin in the same way."""

    def __init__(self, jaccard: float, similarity: float) -> None:
        self._jaccard = jaccard
        self._similarity = similarity
        self._maps: OrderedDict[tuple[str, str, int], _Map] = OrderedDict()

    def queries(self, task: Task) -> list[str]:
        """Those of the tasks that begin like `task`."""
        return list(self._of(task).queries)

    def objection(self, task: Task) -> str | None:
        """Why the task is none: empty, known, lexical or semantic; None where it may be one."""
        if not task.reference or not all(task.reference):
            return "empty"
        others = self._of(task)
        if task.task_id in others.ids:
            return "known"
        if not task.query:
            return None
        words = set(WORD.findall(task.query.lower()))
        if not words:
            return "empty"
        if any(jaccard(words, other) >= self._jaccard for other in others.words):
            return "lexical"
        vector = embed([task.query])[0]
        if any(float(vector @ other) >= self._similarity for other in others.vectors):
            return "semantic"
        return None

    def add(self, task: Task) -> None:
        others = self._of(task)
        others.ids.add(task.task_id)
        if task.query:
            others.queries.append(task.query)
            others.words.append(set(WORD.findall(task.query.lower())))
            others.vectors.append(embed([task.query])[0])

    def _of(self, task: Task) -> _Map:
        place = (task.env, task.split, task.map_seed)
        found = self._maps.setdefault(place, _Map())
        self._maps.move_to_end(place)
        if len(self._maps) > MAPS:
            self._maps.popitem(last=False)
        return found


def jaccard(left: set[str], right: set[str]) -> float:
    """The share of common words in all words of both."""
    both = left | right
    return len(left & right) / len(both) if both else 1.0


async def feasible(
    candidate: Candidate, play: Play, checked: bool, replays: int, kept: int
) -> bool:
    """Whether the reference solves the task in fresh instances: with the chance that exploration
    had, and in `kept` of `replays` instances that have their own.

    `checked`: the environment knows whether the task is solved. Where it does not, the reference
    must at least consist of actions that exist, in an episode that lasts for all of them.
    """
    task, reference = candidate.task, candidate.task.reference or []

    async def works(dynamics_seed: int) -> bool:
        played = await play(task, reference, dynamics_seed)
        whole = not played.invalid and len(played.actions) == len(reference)
        return whole and (played.success or not checked)

    if not await works(candidate.dynamics_seed):
        return False
    seeds = [key(candidate.dynamics_seed, "replay", number) for number in range(replays)]
    worked = 0
    for left, seed in zip(range(replays, 0, -1), seeds, strict=True):
        if worked >= kept or worked + left < kept:
            break
        worked += await works(seed)
    return worked >= kept
