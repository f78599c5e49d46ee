"""Where training tasks come from: numbered maps, tasks queued again, tasks offered from outside.

`peek` says what comes next without changing anything, `take` uses it up: a grant is decided with
the one and recorded with the other. Pure: draws are keyed by the seed and by what they are for.
"""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from evolver_async.schema import Task, key, uniform

PATIENT_AFTER = 2  # evictions for age before a task is issued with patience; one more and it goes


@dataclass(frozen=True)
class Source:
    """The training tasks of a stage; `train` distinct ones, or without end when 0.

    `solved`, `failed`: the chance that a pass over a finite set meets a task whose newest group
    succeeded, or failed, in all its members: such a group has nothing to compare.
    """

    env: str
    params: dict[str, Any]
    train: int
    solved: float = 1.0
    failed: float = 1.0


class Queued(msgspec.Struct):
    """A task that comes before the numbered ones; `wait`: the learner waits for its stragglers."""

    task: Task
    wait: bool


class Cursor(msgspec.Struct):
    """What a restart needs to continue the stream of tasks."""

    position: int = 0
    queue: list[Queued] = []
    ages: dict[str, int] = {}  # evictions for age, since the task last completed a group
    failures: dict[str, int] = {}  # in the environment, since it last completed a group
    quarantined: dict[str, str] = {}  # reason by task id
    offered: set[str] = set()
    success: dict[str, float] = {}  # share of the newest group that succeeded, by task id


def held_out_task(source: Source, number: int) -> Task:
    """The held-out task of evaluation episode `number`."""
    return _task(source, "test", number)


class Tasks:
    """The stream of training tasks. A finite set is met pass after pass, each freshly shuffled."""

    def __init__(self, seed: int, source: Source) -> None:
        self.seed = seed
        self.source = source
        self.cursor = Cursor()
        self._pass: tuple[int, int, list[int]] = (-1, 0, [])

    def peek(self) -> Queued | None:
        """The next task; None when every task of a finite set is quarantined."""
        if self.cursor.queue:
            return self.cursor.queue[0]
        position = self._next_position()
        if position is None:
            return None
        return Queued(_task(self.source, "train", self._number(position)), False)

    def take(self, task: Task) -> None:
        """Uses up `task`, which `peek` returned."""
        if self.cursor.queue:
            queued = self.cursor.queue.pop(0)
            assert queued.task.task_id == task.task_id, (queued.task.task_id, task.task_id)
            return
        position = self._next_position()
        assert position is not None, f"{task.task_id}: no task is left to take"
        self.cursor.position = position + 1

    def requeue(self, task: Task) -> Literal["again", "wait", "too slow"]:
        """What becomes of a task whose group grew too old: once more, with patience, or never."""
        age = self.cursor.ages.get(task.task_id, 0) + 1
        self.cursor.ages[task.task_id] = age
        if age > PATIENT_AFTER:
            self.quarantine(task.task_id, "too slow")
            return "too slow"
        self.cursor.queue.append(Queued(task, age == PATIENT_AFTER))
        return "wait" if age == PATIENT_AFTER else "again"

    def completed(self, task: Task, success: float | None) -> None:
        """A whole group arrived in time; `success`: the share of it, None where it was scripted."""
        self.cursor.ages.pop(task.task_id, None)
        self.cursor.failures.pop(task.task_id, None)
        if self.source.train and success is not None:
            self.cursor.success[task.task_id] = success

    def failed(self, task: Task) -> None:
        """Its environment could not run it, for whichever group."""
        self.cursor.failures[task.task_id] = self.cursor.failures.get(task.task_id, 0) + 1

    def quarantine(self, task_id: str, reason: str) -> None:
        self.cursor.quarantined[task_id] = reason
        self.cursor.ages.pop(task_id, None)
        self.cursor.queue = [q for q in self.cursor.queue if q.task.task_id != task_id]

    def offer(self, tasks: list[Task]) -> None:
        """Synthetic tasks, each issued once; one that was offered before is ignored."""
        for task in tasks:
            if task.task_id not in self.cursor.offered:
                self.cursor.offered.add(task.task_id)
                self.cursor.queue.append(Queued(task, False))

    def switch(self, source: Source) -> None:
        """A new stage: what was queued again in the old one goes, offered tasks stay."""
        self.source = source
        self._pass = (-1, 0, [])
        self.cursor.queue = [
            q
            for q in self.cursor.queue
            if q.task.origin == "synthetic" and q.task.env == source.env
        ]

    def _next_position(self) -> int | None:
        """The next task that may be issued and is worth it; where none is worth it, the next."""
        start = self.cursor.position
        end = start + max(2 * self.source.train, len(self.cursor.quarantined) + 1)
        first = None
        for position in range(start, end):
            task_id = self._task_id(position)
            if task_id not in self.cursor.quarantined:
                if self._chosen(task_id, position):
                    return position
                first = position if first is None else first
        return first

    def _chosen(self, task_id: str, position: int) -> bool:
        success = self.cursor.success.get(task_id)
        if success is None or 0 < success < 1:
            return True
        chance = self.source.solved if success else self.source.failed
        return chance >= 1 or uniform(self.seed, "tasks", position) < chance

    def _task_id(self, position: int) -> str:
        return f"{self.source.env}/train/{self._number(position)}"

    def _number(self, position: int) -> int:
        count = self.source.train
        if not count:
            return position
        index = position // count
        if self._pass[:2] != (index, count):
            rng = np.random.Generator(np.random.Philox(key=key(self.seed, "tasks", index)))
            self._pass = (index, count, rng.permutation(count).tolist())
        return self._pass[2][position % count]


def _task(source: Source, split: str, number: int) -> Task:
    return Task(
        task_id=f"{source.env}/{split}/{number}",
        env=source.env,
        split=split,
        map_seed=number,
        params=source.params,
    )
