"""Stream of training tasks: numbered ones, a pool of synthetic ones, rows beside them, and tasks
queued again.

`peek` returns the next task and changes nothing, `take` uses it up: a grant is decided with the one
and recorded with the other. Pure: draws are keyed by the seed and their purpose.
"""

from typing import Literal

import msgspec
import numpy as np

from evolver_async.buffer.tasks.task_source import TaskSource
from evolver_async.errors import Inconsistency
from evolver_async.randomness import key, uniform
from evolver_async.schema import Task

PATIENT_AFTER = 2  # evictions for age before the learner waits for a task; one more quarantines it
MAX_BYTES = 32_768  # of a synthetic task: the pool holds many in memory

# Of a walk through a numbered set; also the key of its draws.
Way = Literal["tasks", "synthetic", "explore", "data"]


class Queued(msgspec.Struct):
    """A task ahead of the numbered ones.

    `wait`: the learner waits for its stragglers. `guided`: it is the guided repeat of a group that
    failed throughout.
    """

    task: Task
    wait: bool
    guided: bool = False


class Walk(msgspec.Struct, frozen=True):
    """Position in a numbered set that is walked pass after pass, each freshly shuffled.

    A pass covers the `size` numbers that existed when it began, so a set may grow. In an unbounded
    set the numbers are the positions.
    """

    position: int = 0
    index: int = 0  # of this pass
    start: int = 0  # the position at which it began
    size: int = 0

    def on(self, count: int) -> "Walk":
        """Return this position; it begins a pass over `count` numbers if the last pass is over."""
        if self.position < self.start + self.size:
            return self
        return Walk(self.position, self.index + (self.size > 0), self.position, count)

    def further(self) -> "Walk":
        return Walk(self.position + 1, self.index, self.start, self.size)


class Cursor(msgspec.Struct):
    """Durable state of the stream of tasks."""

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


class TaskStream:
    """Stream of training tasks. A set is walked pass after pass, each freshly shuffled."""

    def __init__(self, seed: int, source: TaskSource) -> None:
        self.seed = seed
        self.source = source
        self._orders: dict[Way, tuple[Walk, np.ndarray]] = {}
        self.restore(Cursor())

    def restore(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.known = {task.task_id: task.env for task in cursor.pool}  # environments of the pool
        self._next: dict[Way, tuple[Walk, Task] | None] = {}  # found already
        self._pool_size: int | None = None  # counted already
        self._untried: int | None = None  # likewise

    def peek(self, synthetic: float = 0.0) -> Queued | None:
        """Return the next task, None if there is none.

        `synthetic`: the share of the pool. An empty set is replaced by the other one, unless that
        has no share at all.
        """
        if self.cursor.queue:
            return self.cursor.queue[0]
        taken = self._walk("tasks").position + self._walk("synthetic").position
        ways: list[Way] = ["tasks"] if synthetic < 1 else []
        if synthetic > 0:
            first = uniform(self.seed, "mixture", taken) < synthetic
            ways.insert(0 if first else 1, "synthetic")
        if self.source.is_row(taken + self._walk("data").position):
            ways.insert(0, "data")
        found = next(filter(None, map(self._find, ways)), None)
        return None if found is None else Queued(found[1], False)

    def exhausted(self) -> bool:
        """True if no task of the source or the pool may be issued any more."""
        return self.peek(0.5) is None

    def take(self, task: Task) -> None:
        """Use up `task`, which `peek` returned."""
        self.cursor.since_exploration += 1
        if self.cursor.queue:
            queued = self.cursor.queue.pop(0)
            if queued.task.task_id != task.task_id:
                raise Inconsistency(f"{task.task_id}: {queued.task.task_id} is next")
            return
        beside: Way = "tasks" if self.source.beside is None else "data"
        ways: dict[str, Way] = {"synthetic": "synthetic", "recorded": beside}
        self._pass(ways.get(task.origin, "tasks"), task)

    def next_exploration(self) -> Task | None:
        """The task with which the next exploration begins, None if all are quarantined."""
        found = self._find("explore")
        return None if found is None else found[1]

    def explore(self, task: Task) -> None:
        """Use up `task`, which `next_exploration` returned."""
        self.cursor.since_exploration = 0
        self._pass("explore", task)

    def requeue(
        self, task: Task, complete: bool = False, guided: bool = False, waited: bool = True
    ) -> Literal["again", "wait", "too slow"]:
        """Queue a task whose group became too old: plainly, with waiting, or never again.

        A task with `complete` groups is not too slow, however often they are not taken; nor is one
        whose group was not `waited` for, as several of a task can become too old at once.
        """
        if task.task_id in self.cursor.quarantined:
            return "too slow"
        counts = self.cursor.missed if complete else self.cursor.ages
        age = counts[task.task_id] = counts.get(task.task_id, 0) + 1
        if age > PATIENT_AFTER and waited and not complete:
            self.quarantine(task.task_id, "too slow")
            return "too slow"
        self.queue_again(task, wait=age >= PATIENT_AFTER, guided=guided)
        return "wait" if age >= PATIENT_AFTER else "again"

    def queue_again(self, task: Task, wait: bool = False, guided: bool = False) -> None:
        """Queue the task once more, ahead of the numbered ones, unless it is quarantined."""
        if task.task_id in self.cursor.quarantined:
            return
        self.cursor.queue.append(Queued(task, wait, guided))

    def taken(self, task: Task) -> None:
        """Note that the learner took a group of the task."""
        self.cursor.missed.pop(task.task_id, None)

    def completed(self, task: Task, success: float | None) -> None:
        """Note a complete group; `success`: its share of successes, None if it was scripted."""
        self.cursor.ages.pop(task.task_id, None)
        self.cursor.failures.pop(task.task_id, None)
        if success is not None and (self.source.train or task.origin == "synthetic"):
            self.cursor.success[task.task_id] = success
            self._next.clear()
            self._untried = None

    def failed(self, task: Task) -> None:
        """Count a failure of the task's environment."""
        self.cursor.failures[task.task_id] = self.cursor.failures.get(task.task_id, 0) + 1

    def quarantine(self, task_id: str, reason: str) -> None:
        self.cursor.quarantined[task_id] = reason
        self.cursor.ages.pop(task_id, None)
        self.cursor.missed.pop(task_id, None)
        self.cursor.queue = [q for q in self.cursor.queue if q.task.task_id != task_id]
        self._next.clear()
        self._pool_size = self._untried = None

    def lift_quarantines(self) -> None:
        """Let the tasks try again from the beginning: what was wrong may have been mended."""
        for task_id in self.cursor.quarantined:
            self.cursor.failures.pop(task_id, None)
        self.cursor.quarantined = {}
        self._next.clear()
        self._pool_size = self._untried = None

    def offer(self, tasks: list[Task], duplicates: int) -> None:
        """Add new tasks to the pool; `duplicates`: offers of known tasks."""
        self.cursor.pool += tasks
        self.cursor.duplicates += duplicates
        self.known |= {task.task_id: task.env for task in tasks}
        self._next.clear()
        self._pool_size = self._untried = None

    def pool_size(self) -> int:
        """The number of tasks of the pool that may be issued in this stage."""
        if self._pool_size is None:
            self._pool_size = len(self._pool())
        return self._pool_size

    def untried(self) -> int:
        """The number of tasks of the pool that may be issued and never had a complete group."""
        if self._untried is None:
            tried = self.cursor.success
            self._untried = sum(task_id not in tried for task_id in self._pool())
        return self._untried

    def _pool(self) -> list[str]:
        barred, envs = self.cursor.quarantined, self.source.envs
        return [one for one, env in self.known.items() if env in envs and one not in barred]

    def switch(self, source: TaskSource) -> None:
        """Begin a stage with this source: the queue is emptied, the pool stays.

        What is known of its tasks stays as long as the ids name the same tasks.
        """
        if source.named != self.source.named:
            self._forget_numbered()
        for way in ("tasks", "explore", "data"):
            walk, size = self._walk(way), _count_of(source, way)
            if size != _count_of(self.source, way):
                index = walk.position // size if size else 0
                self.cursor.walks[way] = Walk(walk.position, index, index * size, size)
        self.source = source
        self.cursor.queue = []
        self._next.clear()
        self._pool_size = self._untried = None

    def _forget_numbered(self) -> None:
        """Forget what is known of tasks that are not in the pool."""
        at = self.cursor
        for known in (at.ages, at.missed, at.failures, at.quarantined, at.success):
            for task_id in known.keys() - self.known:
                del known[task_id]

    def _walk(self, way: Way) -> Walk:
        return self.cursor.walks.get(way, Walk()).on(self._count(way))

    def _count(self, way: Way) -> int:
        return len(self.cursor.pool) if way == "synthetic" else _count_of(self.source, way)

    def _pass(self, way: Way, task: Task) -> None:
        found = self._find(way)
        if found is None or found[1].task_id != task.task_id:
            raise Inconsistency(f"{task.task_id}: not next")
        self.cursor.walks[way] = found[0].further()
        self._next.clear()

    def _find(self, way: Way) -> tuple[Walk, Task] | None:
        """The next position with a task that may be issued and passes the draw of `_worthy`.

        If no task passes, the next one that may be issued.
        """
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
            number = walk.position
            if walk.size:
                number = int(self._order(way, walk)[walk.position - walk.start])
            task_id = self._playable(way, number)  # the task itself is made when it is found
            if task_id is not None:
                if way == "explore" or self._worthy(task_id, way, walk.position):
                    return walk, self._task(way, number)
                first = first or (walk, number)
            walk = walk.further()
        return None if first is None else (first[0], self._task(way, first[1]))

    def _playable(self, way: Way, number: int) -> str | None:
        """Return the id of a task, None if it must not be issued in this stage."""
        if way == "synthetic":
            task = self.cursor.pool[number]
            task_id = task.task_id if task.env in self.source.envs else None
        elif way == "data" and (rows := self.source.beside) is not None:
            task_id = rows.task_id("train", number % rows.count("train"))
        else:
            task_id = self.source.task_id("train", number)
        return None if task_id in self.cursor.quarantined else task_id

    def _worthy(self, task_id: str, way: Way, position: int) -> bool:
        success = self.cursor.success.get(task_id)
        if success is None or 0 < success < 1:
            return True
        chance = self.source.solved if success else self.source.failed
        return chance >= 1 or uniform(self.seed, way, position) < chance

    def _task(self, way: Way, number: int) -> Task:
        if way == "data" and (rows := self.source.beside) is not None:
            return rows.task("train", number % rows.count("train"))
        return self.cursor.pool[number] if way == "synthetic" else self.source.task("train", number)

    def _order(self, way: Way, walk: Walk) -> np.ndarray:
        """The shuffled numbers of a pass."""
        known, order = self._orders.get(way, (Walk(), np.zeros(0, np.int64)))
        if (known.index, known.size) != (walk.index, walk.size):
            rng = np.random.Generator(np.random.Philox(key=key(self.seed, way, walk.index)))
            order = rng.permutation(walk.size)
            self._orders[way] = walk, order
        return order


def _count_of(source: TaskSource, way: Way) -> int:
    """Return the size of a source's set, 0 for an unbounded one."""
    if way != "data":
        return source.train
    return 0 if source.beside is None else source.beside.count("train")
