"""Tasks of a stage by number: of one environment, of a mixture, or rows of files."""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import msgspec

from evolver_async.buffer.tasks.data_files import DataTasks
from evolver_async.buffer.tasks.rows import GivenTasks, spread
from evolver_async.schema import Task
from evolver_async.splits import Split

GOLDEN = (math.sqrt(5) - 1) / 2  # the number whose multiples spread most evenly


@dataclass(frozen=True)
class MixturePart:
    """One environment of a mixture; its `weight` over the sum of all is its share of the tasks."""

    env: str
    params: dict[str, Any]
    weight: float = 1.0


@dataclass(frozen=True)
class TaskSource:
    """Tasks of a stage: numbered ones of its environment, or the `given` ones.

    `train`: number of distinct training tasks, 0 for an unbounded set. `evaluated`: split of the
    evaluations that have no set of their own. `mixture`: several environments instead of `env`.
    `given`: tasks of rows, `train` of them in the train split; `data`: rows to learn from, which
    take the place of all training tasks; `beside`: rows that have a `share` of the groups beside
    them. `greedy`: evaluations do not sample.
    `solved`, `failed`: the chance that a pass over a finite set, or over the pool, includes a task
    whose newest group succeeded, or failed, in all its members: such a group has no contrast.
    """

    env: str
    params: dict[str, Any]
    train: int
    solved: float = 1.0
    failed: float = 1.0
    evaluated: Split = "validation"
    mixture: tuple[MixturePart, ...] = ()
    given: GivenTasks | None = None
    data: DataTasks | GivenTasks | None = None
    beside: DataTasks | None = None
    share: float = 0.0
    greedy: bool = False

    @cached_property
    def parts(self) -> tuple[MixturePart, ...]:
        return self.mixture or (MixturePart(self.env, self.params),)

    @property
    def named(self) -> object:
        """Return what its ids name: sources that agree in it have equal tasks under equal ids."""
        if self.data is not None:
            return self.data.named
        return self.parts if self.given is None else self.given.named

    @cached_property
    def envs(self) -> frozenset[str]:
        """The names of all environments that its tasks need."""
        if self.data is not None:
            return self.data.envs
        if self.given is not None:
            return self.given.envs
        return frozenset(part.env for part in self.parts)

    def task(self, split: Split, number: int) -> Task:
        """The task of this number; given tasks repeat after the last one."""
        if (rows := self.rows(split)) is not None:
            return rows.task(split, number % rows.count(split))
        part = self.part(number)
        return Task(
            task_id=f"{part.env}/{split}/{number}",
            env=part.env,
            split=split,
            map_seed=number,
            params=part.params,
        )

    def task_id(self, split: Split, number: int) -> str:
        """The id of the task of this number."""
        if (rows := self.rows(split)) is not None:
            return rows.task_id(split, number % rows.count(split))
        return f"{self.part(number).env}/{split}/{number}"

    @property
    def learnt(self) -> DataTasks | GivenTasks | None:
        """The rows to learn from, None if there are none."""
        return self.data if self.beside is None else self.beside

    def is_row(self, number: int) -> bool:
        """Return True if the training group of this number is of the rows beside the tasks.

        Any run of numbers has nearly the requested share (a Weyl sequence).
        """
        return self.beside is not None and (number + 0.5) * GOLDEN % 1.0 < self.share

    def members(self, task: Task, group_size: int) -> int:
        """Return the number of members of a group: of an rl stage's rows as many as there are."""
        rows = self.learnt
        if task.origin != "recorded" or not isinstance(rows, DataTasks) or not rows.members:
            return group_size
        return rows.size(task)

    def filled(self, task: Task, members: int) -> Task:
        """Return a task as a ticket carries it, a group of rows with its rows."""
        rows = self.learnt
        if task.origin != "recorded" or not isinstance(rows, DataTasks) or not rows.members:
            return task
        return rows.filled(task, members)

    def rows(self, split: Split) -> DataTasks | GivenTasks | None:
        """Return the rows that a split's tasks are made of, None if they are numbered."""
        return self.data if split == "train" and self.data is not None else self.given

    @cached_property
    def held_out(self) -> "TaskSource":
        """The source of evaluations, which know nothing of rows to learn from."""
        return self if self.data is None else replace(self, data=None)

    def part(self, number: int) -> MixturePart:
        """The environment of the task of this number.

        Any run of numbers has nearly the requested shares (a Weyl sequence).
        """
        ends = list(accumulate(part.weight for part in self.parts))
        place = (number + 0.5) * GOLDEN % 1.0 * ends[-1]
        return self.parts[min(bisect_right(ends, place), len(ends) - 1)]

    def episodes(self, wanted: int) -> int:
        """Return how many of the `wanted` evaluation episodes can differ: a greedy reply to the
        same prompt is the same reply, so rows of prompts are not played again to fill a number."""
        if self.given is None or not self.given.rows.meta.prompt or not self.greedy:
            return wanted
        return min(wanted, self.given.count(self.evaluated))

    def examples(self, split: Split = "train") -> list[Task]:
        """One task of this split of every part of the mixture, or of a few rows."""
        if (rows := self.rows(split)) is not None:
            return rows.examples(split)
        return [replace(self, mixture=(part,)).task(split, 0) for part in self.parts]


@dataclass(frozen=True)
class EvalSet:
    """One set of `eval.sets`: `k` samples of each of `tasks` tasks of a split, from `first` on."""

    source: TaskSource
    split: Split
    first: int
    tasks: int
    k: int
    temperature: float
    guided: bool = False

    def task(self, number: int) -> Task:
        """The task of this number within the set; the same numbers always give the same tasks."""
        return _numbered(self.source, self.split, self.first + number)

    def examples(self) -> list[Task]:
        """One of its tasks of every part of the mixture, or of a few rows."""
        if self.source.given is not None:
            count = min(self.tasks, self.source.given.count(self.split))
            return [self.task(number) for number in spread(count)]
        tasks = [self.task(number) for number in reversed(range(self.tasks))]
        return list({(task.env, repr(task.params)): task for task in tasks}.values())


def held_out_task(source: TaskSource, number: int) -> Task:
    """The held-out task of evaluation episode `number`."""
    return _numbered(source, source.evaluated, number)


def _numbered(source: TaskSource, split: Split, number: int) -> Task:
    """The task of this number in a split.

    A repeated task of a file gets another name: the name is the key of its dynamics.
    """
    task = source.held_out.task(split, number)
    again = number // source.given.count(split) if source.given is not None else 0
    return msgspec.structs.replace(task, task_id=f"{task.task_id}/{again}") if again else task
