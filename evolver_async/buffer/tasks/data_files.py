"""Files of `data`: rows to learn from, as tasks that say which row and nothing else.

JSON lines are copied as they are and cut at their ends of lines, without a look at most of them: a
million conversations begin within seconds, and a row that cannot be read is left out, by name, when
its turn comes. Those looked at before a start are the first ones and some of the others.
Rows of the validation split are measured and never learnt.
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
from evolver_async.buffer.tasks.examples import examples_of, is_conversation
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


@dataclass(frozen=True)
class DataTasks:
    """Tasks that are rows to learn from. `env`: the environment that they are counted under."""

    rows: Rows
    env: str
    columns: Mapping[str, str]

    def count(self, split: Split) -> int:
        return self.rows.meta.counts.get(split, 0)

    @property
    def named(self) -> object:
        """Return what decides the tasks: equal values have equal tasks under equal ids."""
        return self.rows.meta.digests

    @property
    def envs(self) -> frozenset[str]:
        return frozenset((self.env,))

    def task_id(self, split: Split, number: int) -> str:
        """Return the id of a task: file and place of its row."""
        return self.rows.where(self.rows.index(split, number))

    def task(self, split: Split, number: int) -> Task:
        """Make the task of a row; one that is no object in JSON, or holds what the wire does not
        carry, has the problem as text instead."""
        index = self.rows.index(split, number)
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
        """Make tasks of the first rows and of some others."""
        count = self.count(split)
        numbers = {*range(min(LOOKED_AT, count)), *spread(count)}
        return [self.task(split, number) for number in sorted(numbers)]


def data_tasks(data: DataConfig, env: str, params: Mapping[str, object]) -> DataTasks | GivenTasks:
    """Return the tasks of rows: conversations, or tasks of environments with their solutions.

    Raises ConfigError, which names key, file and row.
    """
    rows = data_rows(data)
    if is_conversation(dict.fromkeys(rows.meta.columns, 0), data.columns):
        return DataTasks(rows, env, data.columns)
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
        if first is not None and is_conversation(first[1], dict(columns)):
            held = TemporaryDirectory(prefix="evolver-rows-")
            _copy(files, Path(held.name), [*first[1]])
            return Rows(Path(held.name), held)
    return row_files.read(files, _, row_files.ReadAs(columns=columns, subset=subset), revision)


def _copy(files: tuple[DataFile, ...], directory: Path, columns: list[str]) -> None:
    """Write stored rows of files of JSON lines, whose lines nobody has read yet.

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
    arrays = {
        "starts": np.append(start, written).astype(np.uint64),
        "order": np.arange(count, dtype=np.uint32),
        "names": np.arange(count, dtype=np.uint64),
        "places": np.concatenate(places),
    }
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array)
    meta = Meta(
        prompt="",
        split="",
        columns=columns,
        files=named,
        counts=counts,
        digests={split: digest.hexdigest() for split, digest in digests.items()},
        first={split: {"": 0} for split in counts},
    )
    (directory / META).write_bytes(msgspec.json.encode(meta))


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
            examples_of(task.row, kind, tasks.columns)
        except ValueError as error:
            raise ConfigError(f"{AT}: {task.task_id}: {error}") from None
