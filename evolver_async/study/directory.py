"""The directory of a study: its frozen definition, its runs, their states and failures.

`definition.yaml` is the study, `cells/` the resolved recipe of every cell, `code.json` and `code/`
the digests and copies of the own modules that they name, `runs/` their run directories, `cold/`
those of the cold starts, `logs/` the output of `train`, `failures.json` the errors of failed runs.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evolver_async.config import Config, ConfigError
from evolver_async.config.arguments import flow
from evolver_async.config.load import dump, load, load_written
from evolver_async.config.secrets import escaped, mask
from evolver_async.files import parsed, write_whole
from evolver_async.launch import own_code
from evolver_async.launch.run_directory import facts_of
from evolver_async.runs.watch.runs import END
from evolver_async.study import definition as definitions
from evolver_async.study.cells import Cell, as_arguments, cells_of, cold_stages, differences
from evolver_async.study.definition import SEED, Definition

DEFINITION = "definition.yaml"
FAILURES = "failures.json"
CODE = "code.json"  # digests of own modules by file
OPEN = ("waiting", "unfinished")  # states of runs that are still to be run
FIXED = ("seeds", "variants", "grid", "tie", "cold_start")  # shape the runs; others their reading

RunState = Literal["waiting", "unfinished", "finished", "failed"]


@dataclass(frozen=True)
class Study:
    """A study with its directory and the resolved configuration of every cell.

    given: the runs, if these are not the study's own (`given.compared`).
    """

    out: Path
    definition: Definition
    cells: Sequence[Cell]
    configs: Mapping[str, Config]
    given: "Sequence[CellRun]" = ()

    @property
    def baseline(self) -> Cell:
        """The cell that the others are compared with. ConfigError if there is none of its name."""
        wanted = self.definition.baseline
        names = [cell.name for cell in self.cells]
        if wanted and wanted not in names:
            close = difflib.get_close_matches(wanted, names, 1)
            hint = f", did you mean {close[0]}?" if close else f"; cells are: {', '.join(names)}"
            raise ConfigError(f"baseline: the study has no cell {wanted}{hint}")
        return self.cells[names.index(wanted) if wanted else 0]


@dataclass(frozen=True)
class CellRun:
    """One run: a cell with a seed, or the cold start of a seed (`cell` is None)."""

    cell: Cell | None
    seed: int
    directory: Path

    @property
    def name(self) -> str:
        """Name of the run, of its directory and of its log."""
        return self.directory.name


def runs_of(study: Study) -> list[CellRun]:
    """Return the runs of all cells, seed by seed, so that pairs are complete early."""
    if study.given:
        return [*study.given]
    return [
        CellRun(cell, seed, study.out / "runs" / f"{cell.name}-s{seed}")
        for seed in study.definition.seeds
        for cell in study.cells
    ]


def cold_run(study: Study, seed: int) -> CellRun:
    """Return the cold start of a seed, whose name no run of a cell has."""
    return CellRun(None, seed, study.out / "cold" / f"cold-{seed}")


def existing(out: Path) -> Study | None:
    """Read the study of a directory, None if it has none. Raises ConfigError."""
    path = out / DEFINITION
    if not path.exists():
        return None
    definition = definitions.read(path)
    if definition is None:
        raise ConfigError(f"{path}: is not the definition of a study")
    cells = cells_of(definition)
    configs = {cell.name: load(_frozen(out, cell.name)) for cell in cells}
    return Study(out, definition, cells, configs)


def begin(study: Study) -> None:
    """Write the definition, the recipe of every cell and its own code, or refuse another study's
    directory."""
    before = existing(study.out)
    if before is not None:
        refuse_another(before, study)
        refuse_changed_code(study)
    elif (study.out / "runs").exists():
        raise ConfigError(f"{study.out}: has runs of no study (no {DEFINITION}); choose another")
    else:
        (study.out / "cells").mkdir(parents=True, exist_ok=True)
        for name, config in study.configs.items():
            dump(config, _frozen(study.out, name))
        code = own_code.keep(own_code.own_code(study.configs.values()), study.out)
        write_whole(study.out / CODE, json.dumps(code, indent=1))
    write_whole(study.out / DEFINITION, definitions.dump(study.definition))


def refuse_another(before: Study, after: Study) -> None:
    """Raise ConfigError if a directory holds a study with other runs."""
    if difference := difference_of(before, after):
        raise ConfigError(
            f"{after.out}: holds another study: {mask(difference)}; choose another --out"
        )


def refuse_changed_code(study: Study) -> None:
    """Raise ConfigError if own code is not what the study began with: its runs would not compare.

    Only a study that began before its code was recorded goes on with any.
    """
    before = facts_of(study.out / CODE)
    if before is None:
        return
    now = own_code.digests(own_code.own_code(study.configs.values()))
    if difference := own_code.changed(before, now):
        name = difference.partition(" ")[0]
        kept = own_code.copy_of(study.out, name, before[name]) if name in before else None
        hint = f"put {kept} back, or " if kept else ""
        raise ConfigError(
            f"{study.out}: own code: {difference} since the study began; {hint}choose another --out"
        )


def difference_of(before: Study, after: Study) -> str:
    """Name the first difference that changes the runs of a study; "" if there is none."""
    for name in FIXED:
        old, new = (_plain(getattr(one.definition, name)) for one in (before, after))
        if old != new:
            return f"{name}: was {_shown(old)}, is {_shown(new)}"
    for cell in before.cells:
        changed = differences(before.configs[cell.name], after.configs[cell.name])
        for key, old, new in changed:
            return f"cell {cell.name}: {key} was {old!r}, is {new!r}"
    return ""


def _plain(value: Any) -> Any:
    """Return mappings as lists of pairs, because the order of axes names the first cell."""
    if isinstance(value, Mapping):
        return [(key, _plain(item)) for key, item in value.items()]
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    if not isinstance(value, list):
        return str(value).lower()
    parts = [
        f"{item[0]}={_shown(item[1])}" if isinstance(item, tuple) else str(item) for item in value
    ]
    return ",".join(parts) or "empty"


def _frozen(out: Path, cell: str) -> Path:
    return out / "cells" / f"{cell}.yaml"


def command_of(study: Study, run: CellRun) -> list[str]:
    """Return the arguments of `evolver-async` that begin or continue a run."""
    first = study.cells[0].name
    metrics = study.configs[first if run.cell is None else run.cell.name].metrics
    job = "cold-start" if run.cell is None else run.cell.name
    place = [
        f"run.dir={flow(escaped(str(run.directory.parent)))}",
        "metrics.panel=none",
        f"metrics.group={flow(escaped(metrics.group or study.out.resolve().name[:128]))}",
        f"metrics.job_type={flow(escaped(metrics.job_type or job[:64]))}",
    ]
    recipe = _frozen(study.out, first if run.cell is None else run.cell.name)
    tied = [f"{key}={run.seed}" for key, source in study.definition.tie.items() if source == SEED]
    own = [f"{SEED}={run.seed}", f"run.name={flow(run.name)}", *tied]
    if run.cell is None:
        config = study.configs[first]
        stages = config.stages[: cold_stages(study.configs)]
        cut = as_arguments("stages", stages)
        return ["train", str(recipe), "--resume", "auto", *own, *place, *cut]
    begun = (run.directory / "config.yaml").exists()
    if begun or not study.definition.cold_start:
        return ["train", str(recipe), "--resume", "auto", *own, *place]
    config, cold = study.configs[run.cell.name], cold_run(study, run.seed)
    changed = differences(study.configs[first], config)
    # The cold start's own stages name its copies of task files.
    trained = load_written(cold.directory).stages
    stages = [*trained, *config.stages[len(trained) :]]
    values = {key: new for key, _, new in changed if key != "stages"} | {"stages": stages}
    changes = [text for key, value in values.items() for text in as_arguments(key, value)]
    return ["train", "--resume", str(cold.directory), "--fork", run.name, *place, *changes]


def state_of(study: Study, run: CellRun) -> tuple[RunState, str]:
    """Return the state of a run and the error of a failed one."""
    failures = read_failures(study.out)
    if run.name in failures:
        return "failed", failures[run.name]
    if not (run.directory / "config.yaml").exists():
        if run.cell is not None and study.definition.cold_start:
            cold, error = state_of(study, cold_run(study, run.seed))
            if cold == "failed":
                return "failed", f"its cold start failed: {error}"
        return "waiting", ""
    state, reason = ended(run.directory)
    if state in ("finished", "failed"):
        return state, reason
    return "unfinished", ""


def open_cold_starts(study: Study) -> int:
    """Return the number of cold starts that are neither finished nor failed."""
    if not study.definition.cold_start:
        return 0
    states = [state_of(study, cold_run(study, seed))[0] for seed in study.definition.seeds]
    return sum(state in OPEN for state in states)


def ended(run_dir: Path) -> tuple[str, str]:
    """Return the state and the reason of a launch's end; empty texts if none is recorded."""
    try:
        ending = parsed((run_dir / END).read_text())
        return ending["state"], ending["reason"]
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""


def read_failures(out: Path) -> dict[str, str]:
    """Return the errors of failed runs by name."""
    path = out / FAILURES
    return parsed(path.read_text(encoding="utf-8")) if path.exists() else {}


def record_failure(out: Path, name: str, error: str | None) -> None:
    """Record the error of a run; None forgets it."""
    failures = {key: text for key, text in read_failures(out).items() if key != name}
    if error is not None:
        failures[name] = error
    write_whole(out / FAILURES, f"{json.dumps(failures, indent=1, ensure_ascii=False)}\n")
