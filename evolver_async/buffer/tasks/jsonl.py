"""Task files: JSON lines, checked before the run starts; every task has one fixed split.

A line is `{"query", "env", "params", "seed", "split", "reference", "id"}`, every key optional;
missing keys come from the configuration. A hash of the line's own environment, parameters, seed and
query names the task and decides the split of one without. What comes from the configuration has no
part in it: a line has one split in all stages, and a resume with other parameters changes none.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from evolver_async.config import ConfigError
from evolver_async.config.values.rules import check_plain
from evolver_async.randomness import key
from evolver_async.schema import Task
from evolver_async.splits import Split, split_of

MAX_BYTES = 32_768  # of a line: a task travels in the head of a message


class Row(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One line of the file. `seed`: the task's number in its environment."""

    id: str = ""
    env: str = ""
    params: dict[str, Any] = {}
    seed: int = 0
    split: Literal[""] | Split = ""
    query: str = ""
    reference: list[str] | None = None


_decoder = msgspec.json.Decoder(Row)


def load_tasks(path: Path, env: str, params: dict[str, Any]) -> dict[str, tuple[Task, ...]]:
    """Load the tasks of a file by split, in its order; `env` and `params` are the defaults.

    A line's parameters override `params` if its environment is `env`. Raises ConfigError, which
    names `tasks.path` and the line.
    """
    found: dict[str, list[Task]] = {}
    lines_of: dict[str, int] = {}  # by id, and by content
    for number, task, content in _tasks(path, env, params):
        for name in {task.task_id, content}:
            if name in lines_of:
                same = f"the same task as in line {lines_of[name]}"
                raise ConfigError(f"tasks.path: {path}, line {number}: {same}")
            lines_of[name] = number
        found.setdefault(task.split, []).append(task)
    return {split: tuple(tasks) for split, tasks in found.items()}


def line_of(path: Path, env: str, params: dict[str, Any], task_id: str) -> int:
    """Return the number of the line that holds a task; the arguments of `load_tasks` come first."""
    tasks = _tasks(path, env, params)
    return next(number for number, task, _ in tasks if task.task_id == task_id)


def _tasks(path: Path, env: str, params: dict[str, Any]) -> Iterator[tuple[int, Task, str]]:
    """Yield every task with the number of its line and its content as text."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"tasks.path: {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"tasks.path: {path}, line {number}"
            yield number, *_task(_row(line, where), env, params, where)


def _row(line: bytes, where: str) -> Row:
    if len(line) > MAX_BYTES:
        raise ConfigError(f"{where}: {len(line)} bytes, at most {MAX_BYTES} are allowed")
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _task(row: Row, env: str, params: dict[str, Any], where: str) -> tuple[Task, str]:
    """Make the task of a line; return it with its content, defaults included, as text."""
    name = row.env or env
    merged = {**params, **row.params} if name == env else row.params
    check_plain(f"{where}: params", merged)
    if not 0 <= row.seed < 1 << 63:
        raise ConfigError(f"{where}: seed: {row.seed} is not in 0..2**63 - 1")
    own = _text(row.env, row.params, row)
    digest = key(0, "task", own)
    split = row.split or split_of(own)
    task = Task(
        task_id=f"{name}/{split}/{row.id or f'{digest:016x}'}",
        env=name,
        split=split,
        map_seed=row.seed,
        params=merged,
        reference=row.reference,
        query=row.query,
    )
    return task, _text(name, merged, row)


def _text(env: str, params: dict[str, Any], row: Row) -> str:
    return json.dumps([env, params, row.seed, row.query], sort_keys=True)
