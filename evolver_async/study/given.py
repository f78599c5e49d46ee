"""Comparison of given runs as a study without a definition: its cells follow from configurations.

Runs that differ in their seed alone are one cell. The keys that differ are the swept ones, unless
they are many or a seed comes twice; then every run is a cell of its own.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from evolver_async.config import Config, ConfigError
from evolver_async.config.arguments import text_of
from evolver_async.config.effective.changes import value_of
from evolver_async.config.load import load_written
from evolver_async.config.secrets import looks_secret, mask
from evolver_async.config.values.rules import keys
from evolver_async.study.cells import ADDRESSES, Cell, cell_name
from evolver_async.study.definition import Definition
from evolver_async.study.directory import CellRun, Study

MOST_KEYS = 4  # that make a grid
PLACES = ("run", "metrics", "launch", "security", "checkpoint")  # sections that train nothing
RUN = "run"  # name of the only axis, where every run is a cell


def compared(directories: Sequence[Path]) -> Study:
    """Return the study of these runs, the first of which is in its baseline. Raises ConfigError."""
    runs = list(dict.fromkeys(path.resolve() for path in directories))
    if len(runs) < 2:
        raise ConfigError(f"report: {runs[0]} is given twice; name another run")
    configs = [load_written(path, checked=False) for path in runs]
    seeds = [config.run.seed for config in configs]
    swept = _swept(runs, configs)
    places = [(seed, *values.items()) for seed, values in zip(seeds, swept, strict=True)]
    if len(swept[0]) > MOST_KEYS or len({*places}) < len(places):
        swept = [{RUN: name} for name in _names(runs)]
    cells: list[Cell] = []
    for number, values in enumerate(swept):
        if all(cell.swept != values for cell in cells):
            name = values[RUN] if RUN in values else cell_name(values, number)
            taken = [cell.name for cell in cells]
            cells.append(Cell(f"{name}_{number}" if name in taken else name, values, ()))
    of = [next(cell for cell in cells if cell.swept == values) for values in swept]
    given = [CellRun(*facts) for facts in zip(of, seeds, runs, strict=True)]
    return Study(
        out=Path(os.path.commonpath([path.parent for path in runs])),
        definition=Definition(f"{len(runs)} given runs", tuple(sorted({*seeds}))),
        cells=cells,
        configs={cell.name: config for cell, config in zip(of, configs, strict=True)},
        given=given,
    )


def _swept(runs: Sequence[Path], configs: Sequence[Config]) -> list[dict[str, str]]:
    """Return the values of each run, as texts, of the keys in which they differ."""
    texts: list[Mapping[str, str]] = [
        {
            key: mask(text_of(msgspec.to_builtins(value_of(config, key)))).replace(str(path), RUN)
            for key, _ in keys(Config)
            if _shapes(key)
        }
        for path, config in zip(runs, configs, strict=True)
    ]
    differ = [key for key in texts[0] if len({one[key] for one in texts}) > 1]
    return [{key: one[key] for key in differ} for one in texts]


def _shapes(key: str) -> bool:
    section, name = key.partition(".")[0], key.rpartition(".")[2]
    return section not in PLACES and key not in ADDRESSES and not looks_secret(name)


def _names(runs: Sequence[Path]) -> list[str]:
    """Return the names of the directories; of equal ones with that of the directory around."""
    names = [path.name for path in runs]
    return [
        f"{path.parent.name}/{path.name}" if names.count(path.name) > 1 else path.name
        for path in runs
    ]
