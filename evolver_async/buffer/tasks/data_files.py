"""Files of `data`: rows to learn from, as tasks that say which row and nothing else.

JSON lines are copied as they are and cut at their ends of lines, without a look at most of them: a
million conversations begin within seconds, and a row that cannot be read is left out, by name, when
its turn comes. Those looked at before a start are the first ones and some of the others.
Rows of the validation split are measured and never learnt.
Trajectories of logs are read whole, for the prompts by which they are grouped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from evolver_async.buffer.tasks import row_files, row_tables
from evolver_async.buffer.tasks.examples import examples_of, is_example
from evolver_async.buffer.tasks.logged import is_trajectory, prompt_hash, trajectory_of
from evolver_async.buffer.tasks.rows import (
    LINES,
    META,
    ROW_BYTES,
    GivenTasks,
    Meta,
    RowFile,
    Rows,
    opened,
    spread,
    stored,
)
from evolver_async.config import ConfigError, DataConfig
from evolver_async.schema import Task
from evolver_async.splits import Split

AT = "data.path"
DataFile = tuple[str, str, Split | None]  # the key that names it, its path, its split
LOOKED_AT = 64  # first rows that are read before a start
CHUNK = 1 << 24  # bytes that are copied at once
NEWLINE = ord("\n")
GROUP_BYTES = 3 << 19  # of a group's lines, which one ticket holds
ROWS = "rows"  # in a group's task: place, problem and columns of each of its rows


@dataclass(frozen=True)
class DataTasks:
    """Tasks that are rows to learn from. `env`: the environment that they are counted under.

    With `members` a task is a group of an rl stage: up to so many trajectories of one prompt, or
    one conversation. It names its first row, by its place among the grouped ones (`map_seed`),
    until `filled`: journals hold many tasks.
    """

    rows: Rows
    env: str
    columns: Mapping[str, str]
    members: int = 0

    def count(self, split: Split) -> int:
        if self.members:
            return len(_groups(self.rows, self.members)[1]) - 1 if split == "train" else 0
        return self.rows.meta.counts.get(split, 0)

    def size(self, task: Task) -> int:
        """Return the number of rows of a group."""
        _, starts = _groups(self.rows, self.members)
        return int(starts[np.searchsorted(starts, task.map_seed, side="right")]) - task.map_seed

    def filled(self, task: Task, members: int) -> Task:
        """Return a group's task with its `members` rows, from the same place on as when it was
        granted."""
        grouped, _ = _groups(self.rows, self.members)
        found = grouped[task.map_seed : task.map_seed + members].tolist()
        rows = [[one.task_id, one.query, one.row] for one in map(self._of_row, found)]
        return msgspec.structs.replace(task, row={ROWS: rows})

    @property
    def named(self) -> object:
        """Return what decides the tasks: equal values have equal tasks under equal ids."""
        return self.rows.meta.digests

    @property
    def envs(self) -> frozenset[str]:
        return frozenset((self.env,))

    def task_id(self, split: Split, number: int) -> str:
        """Return the id of a task: file and place of its row."""
        return self.rows.where(self._first(split, number))

    def task(self, split: Split, number: int) -> Task:
        """Make the task of a row, or of a group."""
        if not self.members:
            return self._of_row(self.rows.index(split, number), split)
        return Task(
            task_id=self.task_id(split, number),
            env=self.env,
            split=split,
            map_seed=int(_groups(self.rows, self.members)[1][number]),
            origin="recorded",
        )

    def _first(self, split: Split, number: int) -> int:
        """Return the index of a task's row, or of a group's first one."""
        if self.members:
            grouped, starts = _groups(self.rows, self.members)
            return int(grouped[starts[number]])
        return self.rows.index(split, number)

    def _of_row(self, index: int, split: Split = "train") -> Task:
        """Make the task of a row; one that is no object in JSON, or holds what the wire does not
        carry, has the problem as text instead."""
        try:
            row = self.rows.row(index)
            problem = row_files.not_plain(row) if isinstance(row, dict) else "is no object"
        except (ValueError, RecursionError) as error:
            row, problem = {}, str(error)
        return Task(
            task_id=self.rows.where(index),
            env=self.env,
            split=split,
            map_seed=index,
            origin="recorded",
            query=problem,
            row={} if problem else row,
        )

    def examples(self, split: Split) -> list[Task]:
        """Make tasks of the first rows and of some others, each by itself."""
        count = self.rows.meta.counts.get(split, 0)
        numbers = {*range(min(LOOKED_AT, count)), *spread(count)}
        return [self._of_row(self.rows.index(split, number), split) for number in sorted(numbers)]


@lru_cache(maxsize=8)
def _groups(rows: Rows, members: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the rows that train, those of one prompt together, and the places among
    them at which groups of at most `members` begin, with the end."""
    count = rows.meta.counts.get("train", 0)
    indices = np.array([rows.index("train", number) for number in range(count)], np.int64)
    names = np.array([rows.name(index) for index in indices.tolist()], np.uint64)
    _, first, prompts = np.unique(names, return_index=True, return_inverse=True)
    order = np.argsort(first[prompts], kind="stable")
    starts, prompt, size = list[int](), -1, 0
    for place, (index, name) in enumerate(
        zip(indices[order].tolist(), names[order].tolist(), strict=True)
    ):
        more = rows.size(index)
        full = name != prompt or size + more > GROUP_BYTES
        if not starts or full or place - starts[-1] == members:
            starts.append(place)
            size = 0
        prompt, size = name, size + more
    return indices[order], np.array([*starts, count])


def data_tasks(
    data: DataConfig, env: str, params: Mapping[str, object], members: int = 0
) -> DataTasks | GivenTasks:
    """Return the tasks of rows: conversations, trajectories, or tasks of environments with their
    solutions. `members`: see `DataTasks`.

    Raises ConfigError, which names key, file and row.
    """
    rows = data_rows(data)
    if is_example(dict.fromkeys(rows.meta.columns, 0), data.columns):
        return DataTasks(rows, env, data.columns, members)
    if data.validation:
        raise ConfigError(f"data.validation: must be empty: {data.path} has tasks to be played")
    return GivenTasks(rows, env, dict(params))


def data_rows(data: DataConfig) -> Rows:
    """Return the rows of `data`; a process reads the same files once. Raises ConfigError."""
    if stored(path := Path(data.path)):
        if data.validation:
            raise ConfigError(f"data.validation: must be empty: {path} has the rows of a run")
        return opened(path)
    found, revision = list[DataFile](), ""
    for at, named in ((AT, data.path), ("data.validation", data.validation)):
        if named and not Path(named).exists():
            revision = row_tables.revision_of(at, named, data)
        files = row_files.files_of(at, named) if named else []
        for file in files:
            split: Split | None = None if at == AT else "validation"
            # of several files those that name a split belong to it; one alone is as asked for
            if at == AT and len(files) > 1 and (of := row_files.OF_SPLIT.match(Path(file).name)):
                split = row_files.NAMES_OF_SPLITS[of[1]]
            if split != "test":
                found.append((at, file, split))
    if not any(split in (None, "train") for _, _, split in found):
        names = ", ".join(row_files.files_of(AT, data.path))
        raise ConfigError(f"{AT}: {path}: has no file to learn from, only {names}")
    found.sort(key=lambda one: one[2] == "validation")
    states = tuple(row_files.state_of(Path(file)) for _, file, _ in found)
    rows = _read(tuple(found), states, tuple(data.columns.items()), revision, data.subset)
    if not rows.meta.counts.get("train"):
        raise ConfigError(f"{AT}: {path}: has no rows to learn from, none of a split train")
    return rows


@lru_cache(maxsize=8)
def _read(
    files: tuple[DataFile, ...],
    _: object,
    columns: tuple[tuple[str, str], ...],
    revision: str,
    subset: str,
) -> Rows:
    """Read files into a temporary directory that lives as long as the rows."""
    if all(Path(file).is_file() and not file.endswith(".parquet") for _, file, _ in files):
        at, name, _ = files[0]
        first = next(iter(row_files.lines_of(Path(name), f"{at}: {name}")), None)
        if first is not None and is_example(first[1], dict(columns)):
            held = TemporaryDirectory(prefix="evolver-rows-")
            _copy(files, Path(held.name), first[1], dict(columns))
            return Rows(Path(held.name), held)
    return row_files.read(files, _, row_files.ReadAs(columns=columns, subset=subset), revision)


def _copy(
    files: tuple[DataFile, ...],
    directory: Path,
    first: Mapping[str, Any],
    columns: Mapping[str, str],
) -> None:
    """Write stored rows of files of JSON lines, whose lines nobody has read yet but the `first`.

    Blank lines become part of the row before them, as JSON may end in blanks. Files that train come
    before those of the validation split.
    """
    starts, places, named = [np.zeros(0, np.int64)], [np.zeros(0, np.uint32)], list[RowFile]()
    digests, counts, written = dict[Split, Any](), dict[Split, int](), 0
    with open(directory / LINES, "wb") as copy:
        for at, name, named_split in files:
            path, where, split = Path(name), f"{at}: {name}", named_split or "train"
            digest = digests.setdefault(split, blake2b(digest_size=16))
            for _ in islice(row_files.lines_of(path, where), LOOKED_AT):
                pass  # its beginning, and lines that are no objects, are refused
            found, begin, last = [np.zeros(1, np.int64)], written, b"\n"
            with open(path, "rb") as file:
                while chunk := file.read(CHUNK):
                    ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == NEWLINE)
                    found.append(ends + (written - begin + 1))
                    digest.update(chunk)
                    written += copy.write(chunk)
                    last = chunk[-1:]
            if last != b"\n":
                found.append(np.array([written - begin + 1]))
                digest.update(b"\n")
                written += copy.write(b"\n")
            begins = np.concatenate(found)
            sizes = np.diff(begins)
            if (longest := int(sizes.max(initial=0))) > ROW_BYTES:
                place = int(sizes.argmax()) + 1
                row_files.refuse(where, "line", place, f"{longest} bytes, at most {ROW_BYTES}")
            kept = np.flatnonzero(_filled(path, begins[:-1], sizes))
            if not len(kept):
                raise ConfigError(f"{where}: has no rows")
            starts.append(begins[:-1][kept] + begin)
            places.append((kept + 1).astype(np.uint32))
            named.append(RowFile(str(path), "line", len(kept)))
            counts[split] = counts.get(split, 0) + len(kept)
    start = np.concatenate(starts)
    count = len(start)
    starts_of = np.append(start, written)
    names = np.arange(count, dtype=np.uint64)
    if is_trajectory(first, columns):
        names = _prompts(directory / LINES, starts_of, columns)
    arrays = {
        "starts": starts_of.astype(np.uint64),
        "order": np.arange(count, dtype=np.uint32),
        "names": names,
        "places": np.concatenate(places),
    }
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array)
    meta = Meta(
        prompt="",
        split="",
        columns=[*first],
        files=named,
        counts=counts,
        digests={split: digest.hexdigest() for split, digest in digests.items()},
        first={split: {"": 0} for split in counts},
    )
    (directory / META).write_bytes(msgspec.json.encode(meta))


def _prompts(path: Path, starts: np.ndarray, columns: Mapping[str, str]) -> np.ndarray:
    """Return what names the prompt of every line: its hash, the number of the line without one."""
    names = np.arange(len(starts) - 1, dtype=np.uint64)
    with open(path, "rb") as lines:
        for number, size in enumerate(np.diff(starts).tolist()):
            try:
                row = msgspec.json.decode(lines.read(size), type=dict[str, Any])
            except (ValueError, RecursionError):
                continue  # it is left out when its turn comes
            if (name := prompt_hash(row, columns)) is not None:
                names[number] = name
    return names


def _filled(path: Path, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return for every line whether it holds more than blanks; only short ones are read."""
    filled = np.ones(len(starts), bool)
    with open(path, "rb") as file:
        for index in np.flatnonzero(sizes <= 8).tolist():
            file.seek(int(starts[index]))
            filled[index] = bool(file.read(int(sizes[index])).strip())
    return filled


def check_examples(tasks: DataTasks, kind: str) -> None:
    """Raise ConfigError, naming file and row, for one of the rows looked at that a stage of a
    `kind` cannot learn from."""
    for task in (*tasks.examples("train"), *tasks.examples("validation")):
        try:
            if task.query:
                raise ValueError(task.query)
            if tasks.members and is_trajectory(task.row, tasks.columns):
                trajectory_of(task.row, tasks.columns)
            else:
                examples_of(task.row, kind, tasks.columns)
        except ValueError as error:
            raise ConfigError(f"{AT}: {task.task_id}: {error}") from None
