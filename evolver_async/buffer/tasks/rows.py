"""Stored rows: one JSON object a line in one file, memory-mapped, with an index of numbers.

`files.py` writes them once, from files of any kind; all processes read this form, which needs no
library. A directory holds `rows.jsonl`, `rows.json` (`Meta`) and four arrays:

    starts uint64[N + 1]  where every line begins
    order  uint32[N]      rows by split, in the order of the files within one
    names  uint64[N]      hash that names the row's task, or the prompt of a logged trajectory
    places uint32[N]      number of the row, or of its line, in its file

A row becomes a `Task` when the task is issued: of the environment's own kind, or, with
`tasks.prompt`, of the messages in one column.
"""

import mmap
import os
import shutil
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from evolver_async.config import ConfigError
from evolver_async.schema import Task
from evolver_async.splits import SPLITS, Split, checked_split

META, LINES = "rows.json", "rows.jsonl"
ARRAYS = ("starts", "order", "names", "places")
ROW_BYTES = 1 << 20  # of a line; its task has its prompt a second time
CHECKED = 8  # rows of a split that the checks before a start look at
ROLES = ("system", "user", "assistant", "tool")
FIELDS = ("id", "env", "params", "seed", "split", "query", "reference")  # of a task without prompt


class RowFile(msgspec.Struct, frozen=True):
    """One file of rows: its name for messages, the word for a place in it, and its rows."""

    name: str
    word: Literal["line", "row"]
    rows: int


class Meta(msgspec.Struct, frozen=True):
    """Facts about stored rows. `prompt`, `split`: the keys with which they were indexed.

    By split: `counts` of rows, `digests` of their lines, and in `first` the first row of every
    environment that rows name ("" for that of the configuration).
    """

    prompt: str
    split: str
    columns: list[str]
    files: list[RowFile]
    counts: dict[Split, int]
    digests: dict[Split, str]
    first: dict[Split, dict[str, int]]
    revision: str = ""  # of a data set of the hub


class TaskRow(msgspec.Struct, kw_only=True):
    """The columns of a row that is a task of an environment's own kind."""

    id: str = ""
    env: str = ""
    params: dict[str, Any] = {}
    seed: int = 0
    split: str = ""
    query: str = ""
    reference: list[str] | None = None


class Rows:
    """Stored rows of a directory. `held` keeps a temporary directory for as long as the rows."""

    def __init__(self, directory: Path, held: object = None) -> None:
        self.directory = directory
        self.held = held
        self.meta = msgspec.json.decode((directory / META).read_bytes(), type=Meta)
        ends = accumulate(self.meta.counts.get(split, 0) for split in SPLITS)
        self._begin = dict(zip(SPLITS, (0, *ends), strict=False))

    @cached_property
    def _lines(self) -> mmap.mmap:
        with open(self.directory / LINES, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: np.load(self.directory / f"{name}.npy", mmap_mode="r") for name in ARRAYS}

    def index(self, split: Split, number: int) -> int:
        """Return the index of a split's row among all rows."""
        return int(self._arrays["order"][self._begin[split] + number])

    def row(self, index: int) -> dict[str, Any]:
        """Return a row's columns."""
        start, end = self._arrays["starts"][index : index + 2]
        return msgspec.json.decode(self._lines[start:end])

    def name(self, index: int) -> int:
        """Return the hash that names a row's task, or the prompt of a trajectory."""
        return int(self._arrays["names"][index])

    def size(self, index: int) -> int:
        """Return the bytes of a row's line."""
        start, end = self._arrays["starts"][index : index + 2].tolist()
        return end - start

    def where(self, index: int) -> str:
        """Return the file of a row and its place there, in words."""
        before = 0
        for file in self.meta.files:
            if index < before + file.rows:
                return f"{file.name}, {file.word} {self._arrays['places'][index]}"
            before += file.rows
        raise IndexError(index)

    def save(self, directory: Path) -> None:
        """Put these rows into another directory; they never change, so links are enough."""
        directory.mkdir()
        for name in (META, LINES, *(f"{array}.npy" for array in ARRAYS)):
            try:
                os.link(self.directory / name, directory / name)
            except OSError:  # another file system, or one without links
                shutil.copyfile(self.directory / name, directory / name)


def stored(directory: Path) -> bool:
    """True for a directory of stored rows."""
    return (directory / META).is_file()


def opened(directory: Path) -> Rows:
    """Return the stored rows of a directory; the same ones while they are not written anew."""
    return _opened(directory, (directory / META).stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _opened(directory: Path, _: int) -> Rows:
    return Rows(directory)


@dataclass(frozen=True)
class GivenTasks:
    """Tasks of stored rows. `env` and `params` are those of rows that name no environment.

    A row's parameters override `params` if its environment is `env`. `answer`: the column with the
    reference of a prompt.
    """

    rows: Rows
    env: str
    params: dict[str, Any]
    answer: str = ""

    def count(self, split: Split) -> int:
        return self.rows.meta.counts.get(split, 0)

    @property
    def named(self) -> object:
        """Return what decides the tasks: equal values have equal tasks under equal ids."""
        meta = self.rows.meta
        return meta.digests, meta.prompt, self.env, self.params, self.answer

    def digest(self, split: Split) -> object:
        """Return the identity of the tasks of a split."""
        meta = self.rows.meta
        return meta.digests.get(split), meta.prompt, self.env, self.params, self.answer

    @property
    def envs(self) -> frozenset[str]:
        return frozenset(name or self.env for one in self.rows.meta.first.values() for name in one)

    def task_id(self, split: Split, number: int) -> str:
        """Return the id of a task; that of a prompt needs no look at its row."""
        if not self.rows.meta.prompt:
            return self.task(split, number).task_id
        return f"{self.env}/{split}/{self.rows.name(self.rows.index(split, number)):016x}"

    def task(self, split: Split, number: int) -> Task:
        """Make the task of a split's row."""
        index = self.rows.index(split, number)
        row, name = self.rows.row(index), f"{self.rows.name(index):016x}"
        if self.rows.meta.prompt:
            return Task(
                task_id=f"{self.env}/{split}/{name}",
                env=self.env,
                split=split,
                map_seed=index,
                params=self.params,
                reference=_reference(row.get(self.answer)),
                prompt=messages_of(row[self.rows.meta.prompt]),
                row=row,
            )
        known = task_row(row)
        env = known.env or self.env
        return Task(
            task_id=f"{env}/{split}/{known.id or name}",
            env=env,
            split=split,
            map_seed=known.seed,
            params={**self.params, **known.params} if env == self.env else known.params,
            reference=known.reference,
            query=known.query,
            row={column: value for column, value in row.items() if column not in FIELDS},
        )

    def examples(self, split: Split) -> list[Task]:
        """Make up to `CHECKED` tasks spread over a split, and one of every other environment."""
        return [self.task(split, number) for number in self._examples(split)]

    def _examples(self, split: Split) -> list[int]:
        numbers = spread(self.count(split))
        met = {self.task(split, number).env for number in numbers}
        others = self.rows.meta.first.get(split, {}).items()
        return numbers + [number for env, number in others if (env or self.env) not in met]

    def where(self, task: Task) -> str:
        """Return file and place of one of the `examples`."""
        split = checked_split(task.split)
        numbers = [n for n in self._examples(split) if self.task_id(split, n) == task.task_id]
        return self.rows.where(self.rows.index(split, numbers[0]))


def spread(count: int) -> list[int]:
    """Return up to `CHECKED` numbers below `count`, evenly spread."""
    most = min(CHECKED, count)
    return [number * count // most for number in range(most)]


def task_row(row: dict[str, Any]) -> TaskRow:
    """Return a row's columns as a task of an environment. Raises ValueError for a wrong type."""
    known = {field: row[field] for field in FIELDS if row.get(field) is not None}
    return msgspec.convert(known, TaskRow)


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Return a prompt as chat messages; a text is one of the user. Raises ValueError."""
    if type(value) is str:
        if not value.strip():
            raise ValueError("is empty")
        return [{"role": "user", "content": value}]
    if type(value) is not list or not value:
        kind = "null" if value is None else type(value).__name__
        raise ValueError(f"must be text or a list of messages, is {kind}")
    for number, message in enumerate(value):
        if type(message) is not dict or type(message.get("content")) is not str:
            raise ValueError(f"message {number} must be an object with role and content, both text")
        if message.get("role") not in ROLES:
            raise ValueError(f"message {number}: role must be one of {', '.join(ROLES)}")
    if value[-1]["role"] != "user" or not value[-1]["content"].strip():
        raise ValueError("the last message must be one of the user, with text")
    return [{key: one for key, one in message.items() if one is not None} for message in value]


def _reference(answer: Any) -> list[str] | None:
    """Return an answer as the reference of a task: its text, or the texts of a list."""
    if answer is None:
        return None
    parts = answer if type(answer) is list else [answer]
    return [one if type(one) is str else msgspec.json.encode(one).decode() for one in parts]


def given_tasks(rows: Rows, env: str, params: dict[str, Any], answer: str) -> GivenTasks:
    """Make the tasks of rows; without a column of answers it is `answer`, if there is one.

    Raises ConfigError for a column that is not there.
    """
    columns = rows.meta.columns
    if answer and answer not in columns:
        raise ConfigError(f"tasks.answer: there is no column {answer}; {columns_are(columns)}")
    default = "answer" if "answer" in columns else ""
    return GivenTasks(rows, env, params, (answer or default) if rows.meta.prompt else "")


def columns_are(columns: list[str]) -> str:
    """Return the columns there are, in words."""
    shown = columns[:40]
    more = f", and {len(columns) - len(shown)} more" if len(columns) > len(shown) else ""
    return f"the columns are {', '.join(shown)}{more}"
