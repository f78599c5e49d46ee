"""Where training tasks come from: numbered maps, a pool of the system's own, tasks queued again.

`peek` says what comes next without changing anything, `take` uses it up: a grant is decided with
the one and recorded with the other. Pure: draws are keyed by the seed and by what they are for.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import msgspec
import numpy as np

from evolver_async.schema import Task, key, uniform

GOLDEN = (math.sqrt(5) - 1) / 2  # the number whose multiples spread most evenly
PATIENT_AFTER = 2  # evictions for age before a task is issued with patience; one more and it goes


Way = Literal["tasks", "synthetic", "explore"]  # through a numbered set; names its draws


@dataclass(frozen=True)
class MixturePart:
    """One environment of a mixture; its `weight` over the sum of all is its share of the tasks."""

    env: str
    params: dict[str, Any]
    weight: float = 1.0


@dataclass(frozen=True)
class TaskSource:
    """The tasks of a stage: numbered ones of its environment, or the `given` ones.

    `train`: distinct training tasks; without end when 0. `mixture`: several environments instead of
    `env`. `given`: the tasks themselves, by split, `train` of them in the train split.
    `solved`, `failed`: the chance that a pass over a finite set, or over the pool, meets a task
    whose newest group succeeded, or failed, in all its members: such a group has nothing to
    compare.
    """

    env: str
    params: dict[str, Any]
    train: int
    solved: float = 1.0
    failed: float = 1.0
    mixture: tuple[MixturePart, ...] = ()
    given: dict[str, tuple[Task, ...]] | None = None

    @cached_property
    def parts(self) -> tuple[MixturePart, ...]:
        return self.mixture or (MixturePart(self.env, self.params),)

    @cached_property
    def envs(self) -> frozenset[str]:
        """The names of all environments that its tasks need."""
        if self.given is not None:
            return frozenset(task.env for tasks in self.given.values() for task in tasks)
        return frozenset(part.env for part in self.parts)

    def task(self, split: str, number: int) -> Task:
        """The task of this number; what is given begins anew after its last one."""
        if self.given is not None:
            return self.given[split][number % len(self.given[split])]
        part = self.part(number)
        return Task(
            task_id=f"{part.env}/{split}/{number}",
            env=part.env,
            split=split,
            map_seed=number,
            params=part.params,
        )

    def part(self, number: int) -> MixturePart:
        """Of which environment the task of this number is: any run of numbers has nearly the
        shares that were asked for (a Weyl sequence)."""
        ends = list(accumulate(part.weight for part in self.parts))
        place = (number + 0.5) * GOLDEN % 1.0 * ends[-1]
        return self.parts[min(bisect_right(ends, place), len(ends) - 1)]

    def examples(self) -> list[Task]:
        """One training task of every environment and its parameters."""
        if self.given is not None:
            kinds = {(task.env, repr(task.params)): task for task in reversed(self.given["train"])}
            return list(kinds.values())
        return [replace(self, mixture=(part,)).task("train", 0) for part in self.parts]


class Queued(msgspec.Struct):
    """A task that comes before the numbered ones; `wait`: the learner waits for its stragglers."""

    task: Task
    wait: bool


class Walk(msgspec.Struct, frozen=True):
    """A place on the way through a numbered set, pass after pass, each freshly shuffled.

    A pass meets the `size` numbers that there were when it began, so a set may grow; without an end
    to it, the numbers are the positions.
    """

    position: int = 0
    index: int = 0  # of this pass
    start: int = 0  # the position at which it began
    size: int = 0

    def on(self, count: int) -> "Walk":
        """This place, which begins a pass over `count` numbers where the last one is over."""
        if self.position < self.start + self.size:
            return self
        return Walk(self.position, self.index + (self.size > 0), self.position, count)

    def further(self) -> "Walk":
        return Walk(self.position + 1, self.index, self.start, self.size)


class Cursor(msgspec.Struct):
    """What a restart needs to continue the stream of tasks."""

    walks: dict[Way, Walk] = {}
    queue: list[Queued] = []
    ages: dict[str, int] = {}  # evictions for age, since the task last completed a group
    missed: dict[str, int] = {}  # complete groups that became stale, since one of it was taken
    failures: dict[str, int] = {}  # in the environment, since it last completed a group
    quarantined: dict[str, str] = {}  # reason by task id
    success: dict[str, float] = {}  # share of the newest group that succeeded, by task id
    pool: list[Task] = []  # synthetic tasks, in the order in which they were offered
    duplicates: int = 0  # offered when they were there already
    since_exploration: int = 0  # training groups since the newest exploration


def held_out_task(source: TaskSource, number: int) -> Task:
    """The held-out task of evaluation episode `number`.

    One of a file that is met again has a name of its own: by the name its dynamics are drawn.
    """
    task = source.task("test", number)
    again = number // len(source.given["test"]) if source.given is not None else 0
    return msgspec.structs.replace(task, task_id=f"{task.task_id}/{again}") if again else task


class TaskStream:
    """The stream of training tasks. A set is met pass after pass, each freshly shuffled."""

    def __init__(self, seed: int, source: TaskSource) -> None:
        self.seed = seed
        self.source = source
        self._orders: dict[Way, tuple[Walk, list[int]]] = {}
        self.restore(Cursor())

    def restore(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.known = {task.task_id for task in cursor.pool}
        self._next: dict[Way, tuple[Walk, Task] | None] = {}  # found already

    def peek(self, synthetic: float = 0.0) -> Queued | None:
        """The next task; None where there is none.

        `synthetic`: the share of the pool's. What one set lacks the other gives, unless it is to
        have no share at all.
        """
        if self.cursor.queue:
            return self.cursor.queue[0]
        taken = self._walk("tasks").position + self._walk("synthetic").position
        ways: list[Way] = ["tasks"] if synthetic < 1 else []
        if synthetic > 0:
            first = uniform(self.seed, "mixture", taken) < synthetic
            ways.insert(0 if first else 1, "synthetic")
        for way in ways:
            found = self._find(way)
            if found is not None:
                return Queued(found[1], False)
        return None

    def exhausted(self) -> bool:
        """True if no task may be issued any more, of the given ones and of the pool."""
        return self.peek(0.5) is None

    def take(self, task: Task) -> None:
        """Uses up `task`, which `peek` returned."""
        self.cursor.since_exploration += 1
        if self.cursor.queue:
            queued = self.cursor.queue.pop(0)
            assert queued.task.task_id == task.task_id, (queued.task.task_id, task.task_id)
            return
        self._pass("synthetic" if task.origin == "synthetic" else "tasks", task)

    def next_exploration(self) -> Task | None:
        """The task from whose beginning the next exploration starts; None where all failed."""
        found = self._find("explore")
        return None if found is None else found[1]

    def explore(self, task: Task) -> None:
        """Uses up `task`, which `next_exploration` returned."""
        self.cursor.since_exploration = 0
        self._pass("explore", task)

    def requeue(self, task: Task, complete: bool = False) -> Literal["again", "wait", "too slow"]:
        """Issue a task whose group grew too old again: once more, with patience, or never.

        A task whose groups get `complete` is not too slow, however often they are not taken.
        """
        counts = self.cursor.missed if complete else self.cursor.ages
        age = counts[task.task_id] = counts.get(task.task_id, 0) + 1
        if age > PATIENT_AFTER and not complete:
            self.quarantine(task.task_id, "too slow")
            return "too slow"
        self.queue_again(task, wait=age >= PATIENT_AFTER)
        return "wait" if age >= PATIENT_AFTER else "again"

    def queue_again(self, task: Task, wait: bool = False) -> None:
        """Issue the task once more, before those that are numbered."""
        self.cursor.queue.append(Queued(task, wait))

    def taken(self, task: Task) -> None:
        """The learner got a group of it."""
        self.cursor.missed.pop(task.task_id, None)

    def completed(self, task: Task, success: float | None) -> None:
        """A whole group arrived in time; `success`: the share of it, None where it was scripted."""
        self.cursor.ages.pop(task.task_id, None)
        self.cursor.failures.pop(task.task_id, None)
        if success is not None and (self.source.train or task.origin == "synthetic"):
            self.cursor.success[task.task_id] = success
            self._next.clear()

    def failed(self, task: Task) -> None:
        """Its environment could not run it, for whichever group."""
        self.cursor.failures[task.task_id] = self.cursor.failures.get(task.task_id, 0) + 1

    def quarantine(self, task_id: str, reason: str) -> None:
        self.cursor.quarantined[task_id] = reason
        self.cursor.ages.pop(task_id, None)
        self.cursor.missed.pop(task_id, None)
        self.cursor.queue = [q for q in self.cursor.queue if q.task.task_id != task_id]
        self._next.clear()

    def offer(self, tasks: list[Task], duplicates: int) -> None:
        """New tasks join the pool; `duplicates` others were offered that are known."""
        self.cursor.pool += tasks
        self.cursor.duplicates += duplicates
        self.known |= {task.task_id for task in tasks}
        self._next.clear()

    def pool_size(self) -> int:
        """Tasks of the pool that may be issued."""
        return len(self.known) - sum(task_id in self.known for task_id in self.cursor.quarantined)

    def switch(self, source: TaskSource) -> None:
        """A new stage: what was queued again in the old one goes, the pool stays."""
        if source.train != self.source.train:
            for way in ("tasks", "explore"):
                walk, size = self._walk(way), source.train
                index = walk.position // size if size else 0
                self.cursor.walks[way] = Walk(walk.position, index, index * size, size)
        self.source = source
        self.cursor.queue = []
        self._next.clear()

    def _walk(self, way: Way) -> Walk:
        return self.cursor.walks.get(way, Walk()).on(self._count(way))

    def _count(self, way: Way) -> int:
        return len(self.cursor.pool) if way == "synthetic" else self.source.train

    def _pass(self, way: Way, task: Task) -> None:
        found = self._find(way)
        assert found is not None and found[1].task_id == task.task_id, f"{task.task_id}: not next"
        self.cursor.walks[way] = found[0].further()
        self._next.clear()

    def _find(self, way: Way) -> tuple[Walk, Task] | None:
        """The next place with a task that may be issued and is worth it; where none is, the next
        that may be issued."""
        if way not in self._next:
            self._next[way] = self._search(way)
        return self._next[way]

    def _search(self, way: Way) -> tuple[Walk, Task] | None:
        count = self._count(way)
        if way == "synthetic" and not count:
            return None
        walk, first = self._walk(way), None
        for _ in range(max(2 * count, len(self.cursor.quarantined) + 1)):
            walk = walk.on(count)
            task = self._task(way, walk)
            if task.env in self.source.envs and task.task_id not in self.cursor.quarantined:
                if way == "explore" or self._worthy(task.task_id, way, walk.position):
                    return walk, task
                first = first or (walk, task)
            walk = walk.further()
        return first

    def _worthy(self, task_id: str, way: Way, position: int) -> bool:
        success = self.cursor.success.get(task_id)
        if success is None or 0 < success < 1:
            return True
        chance = self.source.solved if success else self.source.failed
        return chance >= 1 or uniform(self.seed, way, position) < chance

    def _task(self, way: Way, walk: Walk) -> Task:
        number = walk.position
        if walk.size:
            number = self._order(way, walk)[walk.position - walk.start]
        return self.cursor.pool[number] if way == "synthetic" else self.source.task("train", number)

    def _order(self, way: Way, walk: Walk) -> list[int]:
        """The shuffled numbers of a pass."""
        known, order = self._orders.get(way, (Walk(), []))
        if (known.index, known.size) != (walk.index, walk.size):
            rng = np.random.Generator(np.random.Philox(key=key(self.seed, way, walk.index)))
            order = rng.permutation(walk.size).tolist()
            self._orders[way] = walk, order
        return order
