"""The cells of a study: the product of its axes, their names and their checked configurations."""

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from evolver_async.config import Config, ConfigError
from evolver_async.config.arguments import flow
from evolver_async.config.effective.changes import value_of
from evolver_async.config.effective.inert import idle_because
from evolver_async.config.load import load, stage_config
from evolver_async.config.paths import with_absolute_paths
from evolver_async.config.secrets import escaped
from evolver_async.config.sections.run import SUPERVISED
from evolver_async.config.values.rules import keys
from evolver_async.launch.start_checks import check_start
from evolver_async.study.definition import SEED, VARIANT, Definition

OWN_KEYS = ("run.name", "run.dir", SEED, "metrics.panel")  # set by the study itself
ADDRESSES = (
    *("buffer.address", "experience.address", "weights.address", "learner.address"),
    "metrics.prometheus",
)
LONGEST_NAME = 100


@dataclass(frozen=True)
class Cell:
    """One point of the grid: its name, the value of every axis, and its arguments."""

    name: str
    swept: Mapping[str, str]
    changes: tuple[str, ...]


def cells_of(definition: Definition) -> list[Cell]:
    """Return the cells in the order of the axes, the last axis fastest."""
    axes: dict[str, Sequence[str]] = {}
    if definition.variants:
        axes[VARIANT] = list(definition.variants)
    axes |= definition.grid
    cells = []
    for number, values in enumerate(itertools.product(*axes.values())):
        swept = dict(zip(axes, values, strict=True))
        changes = dict(definition.variants.get(swept.get(VARIANT, ""), {}))
        changes |= {key: value for key, value in swept.items() if key != VARIANT}
        tied = {key: source for key, source in definition.tie.items() if source != SEED}
        changes |= {key: swept[source] for key, source in tied.items()}
        texts = tuple(f"{key}={value}" for key, value in changes.items())
        cells.append(Cell(cell_name(swept, number), swept, texts))
    names = [cell.name for cell in cells]
    return [
        replace(cell, name=f"{cell.name}_{number}") if names.count(cell.name) > 1 else cell
        for number, cell in enumerate(cells)
    ]


def short_names(axes: Sequence[str], taken: Sequence[str] = ()) -> dict[str, str]:
    """Return the shortest last parts of keys that tell them apart and from `taken`, by key."""
    short = {}
    for axis in axes:
        parts = axis.split(".")
        tails = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        others = [other for other in axes if other != axis]
        short[axis] = next(
            (
                tail
                for tail in tails
                if tail not in taken and not any(f".{one}".endswith(f".{tail}") for one in others)
            ),
            axis,
        )
    return short


def cell_name(swept: Mapping[str, str], number: int) -> str:
    """Name a cell by its values, as a plain directory name."""
    short = short_names(list(swept))
    parts = [
        value if axis == VARIANT else f"{short[axis]}-{value}" for axis, value in swept.items()
    ]
    name = re.sub(r"[^\w.+-]+", "-", "_".join(parts)).strip("-") or "base"
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}_{number}"


def configs_of(definition: Definition, recipe: Path, cells: Sequence[Cell]) -> dict[str, Config]:
    """Return the checked configuration of every cell by its name. Raises ConfigError.

    Its paths are absolute, so that the study can be continued from another working directory. The
    journals of a study keep everything unless the recipe or an argument says otherwise. The
    argument of a whole mapping or list comes before those of its parts, whichever axis they are of.
    """
    common = [f"{key}={value}" for key, value in definition.overrides.items()]
    seed = definition.seeds[0]  # each run has its own, see `command_of`
    common += [f"{key}={seed}" for key, source in definition.tie.items() if source == SEED]
    configs = {}
    for cell in cells:
        texts = sorted([*common, *cell.changes], key=_depth)
        for text in texts:
            if text.startswith(tuple(f"{key}=" for key in OWN_KEYS)) or text.startswith("run="):
                raise ConfigError(f"{text.partition('=')[0]}: is set by the study itself")
        with _named(cell.name, len(cells)):
            config = with_absolute_paths(load(recipe, texts))
            is_set = any(text.startswith("buffer.archive=") for text in texts)
            if config.buffer.archive == "none" and not is_set:
                config = replace(config, buffer=replace(config.buffer, archive="all"))
        configs[cell.name] = config
    return configs


def _depth(text: str) -> tuple[int, bool]:
    """Return the order of an argument: the parts of its key, then if it appends to a list."""
    key = text.partition("=")[0]
    return key.count(".") + key.count("["), key.endswith("+")


@contextlib.contextmanager
def _named(cell: str, count: int) -> Iterator[None]:
    """Put the name of the cell before an error of the user, if there are several cells."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(f"cell {cell}: {error}" if count > 1 else str(error)) from None


def check_starts(configs: Mapping[str, Config], jobs: int) -> None:
    """Raise ConfigError, naming the cell, for the first problem that a start would meet."""
    for name, config in configs.items():
        with _named(name, len(configs)):
            check_start(config)
            stages = range(len(config.stages))
            if any(stage_config(config, index).safety.action == "pause" for index in stages):
                raise ConfigError("safety.action: pause would hold a study without end")
            if jobs > 1:
                _refuse_addresses(config)


def _refuse_addresses(config: Config) -> None:
    for key in ADDRESSES:
        if value_of(config, key):
            raise ConfigError(f"{key}: cells that run at the same time cannot share it; --jobs 1")


def cold_stages(configs: Mapping[str, Config]) -> int:
    """Return the number of first supervised stages, which a cold start trains once a seed.

    Raises ConfigError if there are none, or if the cells differ in what a cold start trains.
    """
    first, *others = configs.items()
    kinds = [stage.kind for stage in first[1].stages]
    count = len([*itertools.takewhile(lambda kind: kind in SUPERVISED, kinds)])
    if count == 0:
        raise ConfigError("--cold-start: the recipe does not begin with a supervised stage")
    if count == len(kinds):
        raise ConfigError("--cold-start: the recipe has supervised stages only")
    for name, config in others:
        for key in _differing(first[1], config, count):
            raise ConfigError(
                f"--cold-start: cells {first[0]} and {name} differ in {key}, which shapes the"
                " stages that they would share"
            )
    return count


def _differing(before: Config, after: Config, count: int) -> Iterator[str]:
    """Yield the keys in which the first `count` stages, which read them, train something else."""
    if before.stages[:count] != after.stages[:count]:
        yield "stages"
        return
    for index in range(count):
        kind = before.stages[index].kind
        for key, _, new in differences(stage_config(before, index), stage_config(after, index)):
            section, _, name = key.partition(".")
            read = section in ("policy", "env", "tasks")
            if read and not idle_because(kind, section, name, new):
                yield key


def differences(before: Config, after: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys in which two configurations differ, with both values."""
    for key, _ in keys(Config):
        old, new = value_of(before, key), value_of(after, key)
        if old != new:
            yield key, old, new


def as_arguments(key: str, value: Any) -> list[str]:
    """Return the arguments that give a key its value in a configuration.

    A mapping is emptied first, because an argument is merged into the one that is there.
    """
    plain = msgspec.to_builtins(value)
    emptied = [f"{key}={{}}"] if isinstance(plain, dict) and plain else []
    return [*emptied, f"{key}={flow(escaped(plain, f'.{key}'))}"]
