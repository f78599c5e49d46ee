"""Scopes of keys, as their fields declare them: refusal of changes that a scope does not permit."""

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import Any

from evolver_async.config.sections import Config
from evolver_async.config.sections.run import StageConfig
from evolver_async.config.values.config_error import ConfigError
from evolver_async.config.values.rules import Scope, annotations, item_kind, keys, mark, unwrapped


def declared(parts: Iterable[str], kind: Any = Config) -> tuple[Any, Scope]:
    """Return the type of a key below a section, None without one, and its scope.

    A field without a scope has that of its section. An override of a stage has the sections of a
    run. A key within a free mapping (`env.params.size`) has the scope of the mapping.
    """
    scope = Scope.STAGE
    for part in parts:
        if not is_dataclass(kind):
            kind = unwrapped(item_kind(kind))
        elif kind is StageConfig and part == "override":
            kind, scope = Config, Scope.STAGE
        else:
            annotation = annotations(kind).get(part)  # pyright: ignore[reportArgumentType]
            found = mark(annotation, Scope)
            kind, scope = unwrapped(annotation), scope if found is None else found
    return kind, scope


@cache
def keys_of(scope: Scope) -> tuple[str, ...]:
    """Return the keys with a scope, among others. Those of stages themselves are none of them."""
    return tuple(key for key, _ in keys(Config) if scope in declared(key.split("."))[1])


def named(tree: dict[str, Any]) -> Iterator[str]:
    """Yield the keys `section.name` of a tree of sections."""
    for section, values in tree.items():
        yield from (f"{section}.{name}" for name in values) if isinstance(values, dict) else ()


def refuse_whole_run(override: dict[str, Any], where: str) -> None:
    """Raise ConfigError for a key of a stage's override that belongs to the whole run."""
    for key in named(override):
        if Scope.RUN in declared(key.split("."))[1]:
            raise ConfigError(f"{where}.{key}: belongs to the whole run, not to one stage")


def refuse_whole_stage(rollback: dict[str, Any]) -> None:
    """Raise ConfigError for a key of `safety.rollback` that cannot change within a stage."""
    for key in named(rollback):
        kind, scope = declared(key.split("."))
        if kind is not None and scope & (Scope.LEARNER | Scope.RUN) != Scope.LEARNER:
            why = "a rollback can change only what the learner alone reads"
            raise ConfigError(f"{key}: belongs to the whole stage: {why}")
