"""Files of rows: JSON lines, Parquet, data sets of `datasets`, read once and checked row by row.

A row is a task of an environment (`rows.FIELDS`, all optional, other columns for rewards) or, with
`tasks.prompt`, a prompt in one of its columns. Its split is that of its file, or its column's, or
decided by a hash: BLAKE2b of 8 bytes over the roles and contents of a prompt, or over a row's own
environment, parameters, seed and query; modulo 8, 0 is for testing and 1 for validation. The same
hash names the task. What comes from the configuration has no part in it.
"""

import json
import re
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

import msgspec
import numpy as np

from evolver_async.buffer.tasks import row_tables
from evolver_async.buffer.tasks.examples import is_example
from evolver_async.buffer.tasks.logged import is_trajectory, prompt_hash
from evolver_async.buffer.tasks.rows import (
    ARRAYS,
    FIELDS,
    LINES,
    META,
    ROW_BYTES,
    Meta,
    RowFile,
    Rows,
    columns_are,
    messages_of,
    opened,
    stored,
    task_row,
)
from evolver_async.config import ConfigError, TasksConfig
from evolver_async.config.values.rules import PLAIN_DEPTH, check_plain
from evolver_async.randomness import key
from evolver_async.splits import SPLITS, Split, split_of

Record = tuple[int, dict[str, Any], bytes]  # number in its file, columns, line
CHUNK = 4096  # rows that are written at once
KEY = re.compile(rb'"\s*:')  # ends a key, or is in a text
FLAT = frozenset((str, bool, float, type(None)))
BY_BUCKET: tuple[Split, ...] = (
    *("test", "validation", "train", "train"),
    *("train", "train", "train", "train"),
)  # as `split_of`
NAMES_OF_SPLITS: dict[str, Split] = {
    **{split: split for split in SPLITS},
    **dict.fromkeys(("valid", "val", "dev"), "validation"),
}
OF_SPLIT = re.compile(rf"({'|'.join(NAMES_OF_SPLITS)})[-_.]")  # how the name of its file begins
BEGINNINGS = {
    b"PAR1": "is a Parquet file: give it a name that ends in .parquet",
    b"\xef\xbb\xbf": "line 1: begins with a byte order mark (BOM): save it as UTF-8 without one",
    b"\xff\xfe": "line 1: is UTF-16 (it has its byte order mark): save it as UTF-8",
    b"\xfe\xff": "line 1: is UTF-16 (it has its byte order mark): save it as UTF-8",
    b"\x1f\x8b": "is compressed: unpack it first",
    b"[": "line 1: is a JSON array: a file of rows has one object a line",
}
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class ReadAs:
    """Reading of rows: the keys of `tasks`, or the `columns` of `data`, whose rows may be
    conversations or trajectories (`spoken`)."""

    prompt: str = ""
    split: str = ""
    answer: str = ""
    subset: str = ""
    columns: tuple[tuple[str, str], ...] | None = None
    spoken: bool = False


@dataclass(frozen=True)
class RowPart:
    """Rows of one file, or of a split of a data set. `at`: the key and the name, for messages."""

    at: str
    name: str
    word: Literal["line", "row"]
    split: Split | None
    records: Iterator[Record]


def rows_of(tasks: TasksConfig) -> Rows:
    """Return the rows of a configuration; a process reads the same files once.

    Raises ConfigError, which names key, file and row.
    """
    if stored(path := Path(tasks.path)):
        rows = opened(path)
        for name in ("validation", "test"):
            if getattr(tasks, name):
                raise ConfigError(f"tasks.{name}: must be empty: {path} has the rows of a run")
        for name in ("prompt", "split"):
            if (now := getattr(tasks, name)) != (old := getattr(rows.meta, name)):
                raise ConfigError(
                    f"tasks.{name}: {path} was indexed with {old!r}, got {now!r}: name the original"
                    " files by tasks.path"
                )
        return rows
    settings = ReadAs(tasks.prompt, tasks.split, tasks.answer, tasks.subset)
    found, revision = list[tuple[str, str, Split | None]](), ""
    for name, split in (("path", None), ("validation", "validation"), ("test", "test")):
        if named := getattr(tasks, name):
            if not Path(named).exists():
                revision = row_tables.revision_of(f"tasks.{name}", named, tasks)
            found += [(f"tasks.{name}", one, split) for one in files_of(f"tasks.{name}", named)]
    if tasks.split and len({split for _, _, split in found}) > 1:
        raise ConfigError("tasks.split: must be empty where tasks.validation or tasks.test is set")
    states = tuple(state_of(Path(file)) for _, file, _ in found)
    return read(tuple(found), states, settings, revision)


def files_of(at: str, named: str) -> list[str]:
    """Return the files of a path: itself, or those of a directory."""
    path = Path(named)
    if not path.is_dir() or row_tables.is_saved(path):
        return [named]
    files = [str(one) for kind in ("*.parquet", "*.jsonl") for one in sorted(path.glob(kind))]
    if not files:
        raise ConfigError(f"{at}: {path}: has neither Parquet nor JSONL files")
    if len({Path(one).suffix for one in files}) > 1:
        raise ConfigError(f"{at}: {path}: has both Parquet and JSONL files")
    return files


def state_of(path: Path) -> tuple[int, ...]:
    """Return numbers that change when a file does; none for a data set of the hub."""
    if not path.exists():
        return ()
    now = path.stat()
    return now.st_mtime_ns, now.st_size, now.st_ino


@lru_cache(maxsize=8)
def read(
    files: tuple[tuple[str, str, Split | None], ...], _: object, settings: ReadAs, revision: str
) -> Rows:
    """Read files of rows into a temporary directory that lives as long as the rows."""
    held = tempfile.TemporaryDirectory(prefix="evolver-rows-")
    parts = chain.from_iterable(
        parts_of(at, Path(path), of, settings, revision) for at, path, of in files
    )
    _Writer(Path(held.name), settings).write(_agreeing(parts), revision)
    return Rows(Path(held.name), held)


def _agreeing(parts: Iterator[RowPart]) -> Iterator[RowPart]:
    """Yield the parts; refuse some with a split of their own beside others without."""
    first: RowPart | None = None
    for part in parts:
        first = first or part
        if part.at == "tasks.path" and (part.split is None) != (first.split is None):
            named, other = (part, first) if part.split else (first, part)
            raise ConfigError(f"{named.at}: {named.name} names a split, {other.name} does not")
        yield part


def parts_of(
    at: str,
    path: Path,
    split: Split | None = None,
    settings: ReadAs = ReadAs(),
    revision: str = "",
) -> Iterator[RowPart]:
    """Yield the parts of a file or a data set."""
    if path.is_file():
        matched = OF_SPLIT.match(path.name) if at == "tasks.path" else None
        split = NAMES_OF_SPLITS[matched[1]] if matched else split
        parquet = path.suffix == ".parquet"
        word = "row" if parquet else "line"
        where = f"{at}: {path}"
        found = (
            _of_tables(row_tables.parquet(where, path), where, bool(settings.prompt))
            if parquet
            else lines_of(path, where)
        )
        yield RowPart(at, str(path), word, split, found)
        return
    for name, batches in row_tables.data_set(at, path, revision, settings.subset).items():
        own = NAMES_OF_SPLITS.get(name) if split is None else split
        label = f"{path} ({name})" if name else str(path)
        rows = _of_tables(batches, f"{at}: {label}", bool(settings.prompt))
        yield RowPart(at, label, "row", own, rows)


def lines_of(path: Path, where: str) -> Iterator[Record]:
    """Yield the rows of a file of JSON lines; blank lines are none."""
    try:
        with open(path, "rb") as file:
            beginning = file.read(4)
            for magic, problem in BEGINNINGS.items():
                if beginning.startswith(magic):
                    raise ConfigError(f"{where}{', ' if problem[0] == 'l' else ' '}{problem}")
            file.seek(0)
            for number, line in enumerate(file, 1):
                if line := line.strip():
                    yield number, _object(line, where, number), line
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None


def _object(line: bytes, where: str, number: int) -> dict[str, Any]:
    """Decode a line. Raises ConfigError for what is no object, or has a key twice."""
    if len(line) > ROW_BYTES:
        refuse(where, "line", number, f"{len(line)} bytes, at most {ROW_BYTES} are allowed")
    try:
        row = _decode(line)
        if type(row) is not dict:
            raise ValueError(f"{type(row).__name__} instead of an object")
        # so many keys at most are written; if all are there, none is written twice
        if line.count(b":") > len(row) and len(KEY.findall(line)) > _keys(row):
            json.loads(line, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        refuse(where, "line", number, str(error))
    return row


def _keys(value: Any) -> int:
    """Count the keys of all objects in a value."""
    if type(value) is dict:
        return len(value) + sum(map(_keys, value.values()))
    return sum(map(_keys, value)) if type(value) is list else 0


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice} is there twice")
    return made


def _of_tables(
    batches: Iterator[list[dict[str, Any]]], where: str, prompts: bool
) -> Iterator[Record]:
    """Yield the rows of tables, as JSON has them."""
    number = 0
    for batch in batches:
        for row in batch:
            number += 1
            if not prompts and type(params := row.get("params")) is dict:
                # a table gives every row the parameters of all
                row["params"] = {name: one for name, one in params.items() if one is not None}
            line = _encode(row)  # NaN becomes null, a timestamp text
            if len(line) > ROW_BYTES:
                size = f"{len(line)} bytes as JSON, at most {ROW_BYTES} are allowed"
                refuse(where, "row", number, size)
            yield number, row, line


def refuse(where: str, word: str, number: int, problem: str) -> NoReturn:
    raise ConfigError(f"{where}, {word} {number}: {problem}")


class _Writer:
    """Writer of stored rows: one pass over all parts, with numbers of every row in memory."""

    def __init__(self, directory: Path, settings: ReadAs) -> None:
        self.directory, self.settings = directory, settings
        self.prompt, self.split, self.answer = settings.prompt, settings.split, settings.answer
        self.places, self.sizes, self.splits = array("I"), array("I"), bytearray()
        self.names, self.contents = array("Q"), array("Q")
        self.counts = dict.fromkeys(SPLITS, 0)
        self.first: dict[Split, dict[str, int]] = {split: {} for split in SPLITS}
        self.hashes = {split: blake2b(digest_size=16) for split in SPLITS}
        self.columns: dict[str, None] = {}
        self.pending: dict[Split, list[bytes]] = {split: [] for split in SPLITS}

    def write(self, parts: Iterator[RowPart], revision: str) -> None:
        """Write the rows of all parts and their index."""
        files = list[RowFile]()
        with open(self.directory / LINES, "wb") as file:
            for part in parts:
                before = len(self.places)
                self._add(part, file)
                if len(self.places) == before:
                    raise ConfigError(f"{part.at}: {part.name}: has no rows")
                files.append(RowFile(part.name, part.word, len(self.places) - before))
        self._write_arrays(files)
        meta = Meta(
            prompt=self.prompt,
            split=self.split,
            columns=[*self.columns],
            files=files,
            counts={split: count for split, count in self.counts.items() if count},
            digests={split: self.hashes[split].hexdigest() for split in SPLITS},
            first={split: envs for split, envs in self.first.items() if envs},
            revision=revision,
        )
        (self.directory / META).write_bytes(msgspec.json.encode(meta))

    def _add(self, part: RowPart, file: BinaryIO) -> None:
        where, word, lines = f"{part.at}: {part.name}", part.word, list[bytes]()
        describe = self._prompt if self.prompt else self._task
        if not self.prompt and self.settings.columns is not None:
            describe = self._either
        chosen = part.split or ""
        for number, row, line in part.records:
            if not FLAT.issuperset(map(type, row.values())):
                problem = not_plain(row)
                if problem:
                    refuse(where, word, number, problem)
            try:
                env, split = describe(row, chosen)
            except ValueError as error:
                refuse(where, word, number, str(error))
            if not lines:
                self.columns |= dict.fromkeys(row)
            envs = self.first[split]
            if env not in envs:
                envs[env] = self.counts[split]
            self.counts[split] += 1
            self.places.append(number)
            self.sizes.append(len(line) + 1)
            self.splits.append(SPLITS.index(split))
            self.pending[split].append(line)
            lines.append(line)
            if len(lines) == CHUNK:
                self._flush(lines, file)
        self._flush(lines, file)

    def _flush(self, lines: list[bytes], file: BinaryIO) -> None:
        for split, pending in self.pending.items():
            if pending:
                self.hashes[split].update(b"\n".join(pending) + b"\n")
                pending.clear()
        if lines:
            file.write(b"\n".join(lines) + b"\n")
            lines.clear()

    def _prompt(self, row: dict[str, Any], split: str) -> tuple[str, Split]:
        """Note the prompt of a row; return "" and the row's split."""
        try:
            prompt = row[self.prompt]
        except KeyError:
            problem = f"there is no column {self.prompt} (tasks.prompt)"
            raise ValueError(f"{problem}; {columns_are([*row])}") from None
        if type(prompt) is str and prompt and not prompt.isspace():  # the most frequent kind
            content = f"user\0{prompt}"
        else:
            try:
                messages = messages_of(prompt)
            except ValueError as error:
                raise ValueError(f"column {self.prompt}: {error}") from None
            content = "\0".join(f"{one['role']}\0{one['content']}" for one in messages)
        digest = blake2b(content.encode(), digest_size=8).digest()
        self.names.frombytes(digest)
        if split:
            return "", NAMES_OF_SPLITS[split]
        return "", self._named(row, self.split) if self.split else BY_BUCKET[digest[0] & 7]

    def _either(self, row: dict[str, Any], split: str) -> tuple[str, Split]:
        """Note a row of `data`: a conversation, or a task of an environment. The first row decides
        for all of them. A row of no named split trains."""
        if not self.names:
            self.settings = replace(
                self.settings, spoken=is_example(row, dict(self.settings.columns or ()))
            )
        if not self.settings.spoken:
            return self._task(row, split or "train")
        columns = dict(self.settings.columns or ())
        name = prompt_hash(row, columns) if is_trajectory(row, columns) else None
        self.names.append(len(self.names) if name is None else name)
        return "", NAMES_OF_SPLITS[split or "train"]

    def _task(self, row: dict[str, Any], split: str) -> tuple[str, Split]:
        """Note a row that is a task of an environment; return its environment and its split."""
        if row and row.keys().isdisjoint(FIELDS):
            raise ValueError(
                f"has none of the columns of a task ({', '.join(FIELDS)}); {columns_are([*row])};"
                " tasks.prompt names the one that holds the prompt"
            )
        task = task_row(row)
        check_plain("params", task.params)
        if not 0 <= task.seed < 1 << 63:
            raise ValueError(f"seed: {task.seed} is not in 0..2**63 - 1")
        content = json.dumps([task.env, task.params, task.seed, task.query], sort_keys=True)
        self.contents.append(key(0, "task", content))
        self.names.append(key(0, "id", task.env, task.id) if task.id else self.contents[-1])
        if split:
            return task.env, NAMES_OF_SPLITS[split]
        named = self.split or ("split" if task.split else "")
        return task.env, self._named(row, named) if named else split_of(content)

    def _named(self, row: dict[str, Any], column: str) -> Split:
        """Return the split that a column names."""
        if column not in row:
            raise ValueError(f"there is no column {column} (tasks.split); {columns_are([*row])}")
        if type(row[column]) is not str or row[column] not in NAMES_OF_SPLITS:
            expected = f"is none of {', '.join(NAMES_OF_SPLITS)}"
            raise ValueError(f"column {column}: {row[column]!r:.80} {expected}")
        return NAMES_OF_SPLITS[row[column]]

    def _write_arrays(self, files: list[RowFile]) -> None:
        """Write the index; refuse a task that is there twice, and name equal prompts apart."""
        if self.answer and self.answer not in self.columns:
            raise ConfigError(
                f"tasks.answer: there is no column {self.answer}; {columns_are([*self.columns])}"
            )
        names = np.frombuffer(self.names, np.uint64)
        if self.settings.spoken:
            pass  # named by their places, or by their prompts
        elif self.prompt:
            again = np.ones(len(names), bool)
            again[np.unique(names, return_index=True)[1]] = False
            names = names.copy()
            for index in np.flatnonzero(again).tolist():
                names[index] = key(0, "again", int(names[index]), index)
        else:
            for hashes in (np.frombuffer(self.contents, np.uint64), names):
                self._refuse_twice(hashes, files)
        starts = np.zeros(len(names) + 1, np.uint64)
        np.cumsum(np.frombuffer(self.sizes, np.uint32), out=starts[1:])
        splits = np.frombuffer(self.splits, np.uint8)
        order = np.argsort(splits, kind="stable").astype(np.uint32)
        arrays = starts, order, names, np.frombuffer(self.places, np.uint32)
        for name, one in zip(ARRAYS, arrays, strict=True):
            np.save(self.directory / f"{name}.npy", one)

    def _refuse_twice(self, hashes: np.ndarray, files: list[RowFile]) -> None:
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        if len(same):
            second = int(order[same + 1].min())
            first = int(np.flatnonzero(hashes == hashes[second])[0])
            (name, word, at), (other, _, place) = (
                self._place(files, second),
                self._place(files, first),
            )
            where = f"in {word} {place}" + (f" of {other}" if other != name else "")
            refuse(f"tasks.path: {name}", word, at, f"the same task as {where}")

    def _place(self, files: list[RowFile], index: int) -> tuple[str, str, int]:
        before = 0
        for file in files:
            if index < (before := before + file.rows):
                return file.name, file.word, self.places[index]
        raise IndexError(index)


def not_plain(row: dict[str, Any]) -> str:
    """Return the problem of a value that the wire does not carry, "" if there is none."""
    for column, value in row.items():
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            return f"column {column}: must be in -2**63..2**64 - 1"
        if type(value) in (dict, list):
            if _deeper(value, PLAIN_DEPTH):
                return f"column {column}: nested deeper than {PLAIN_DEPTH}"
            try:
                msgspec.msgpack.encode(value)
            except OverflowError:
                return f"column {column}: holds an integer beyond 64 bits"
    return ""


def _deeper(value: Any, depth: int) -> bool:
    if type(value) not in (dict, list):
        return False
    items = value.values() if type(value) is dict else value
    return depth == 0 or any(_deeper(one, depth - 1) for one in items)
