"""`study`: a grid of runs of a recipe, its progress, and its tables and plots."""

import argparse
import contextlib
import importlib.util
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from evolver_async.commands.checked import as_config_errors
from evolver_async.commands.recipes import names_file, recipe_path
from evolver_async.config import ConfigError, ablation
from evolver_async.launch.run_directory import locked
from evolver_async.memory.units import gib
from evolver_async.study import definition as definitions
from evolver_async.study import directory
from evolver_async.study.cells import cells_of, check_starts, cold_stages, configs_of
from evolver_async.study.definition import Definition
from evolver_async.study.directory import OPEN, Study, open_cold_starts, runs_of, state_of
from evolver_async.study.scheduler import Scheduler, forget_failures
from evolver_async.terminal import say

NEEDED = ("mpmath", "matplotlib")
FAILED = 1  # exit code if a run failed


def study(args: argparse.Namespace) -> int:
    """Run the cells of a study that are left; return 1 if a run has failed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"study: needs {' and '.join(missing)}; pip install 'evolver-async[study]'"
        )
    if args.jobs < 1:
        raise ConfigError(f"--jobs: must be at least 1, is {args.jobs}")
    with as_config_errors():
        chosen = _study_of(args)
        if (chosen.out / "config.yaml").exists():
            raise ConfigError(f"--out: {chosen.out} is the directory of a run; choose another")
        if args.summary:
            return _summarize(chosen)
        check_starts(chosen.configs, args.jobs)
        if chosen.definition.cold_start:
            cold_stages(chosen.configs)
    if args.dry_run:
        before = directory.existing(chosen.out)
        if before is not None:
            directory.refuse_another(before, chosen)
            directory.refuse_changed_code(chosen)
        for cell in chosen.cells:
            say(f"{cell.name}: {' '.join(cell.changes) or 'the recipe as it is'}")
        _print_plan(chosen, args.jobs)
        return 0
    with contextlib.ExitStack() as held:
        with as_config_errors():
            chosen.out.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(chosen.out))
            directory.begin(chosen)
        return _run(chosen, args)


def _study_of(args: argparse.Namespace) -> Study:
    """Return the study that the arguments describe, or the one of --out if they name none."""
    before = directory.existing(args.out)
    first = next(iter(args.positional), "=")
    if names_file(first):
        definition, recipe = _written(first)
        changes = args.positional[1:]
    elif before is not None and not args.positional:
        definition, recipe, changes = before.definition, None, []
    else:
        raise ConfigError("study: needs a study or a recipe first, or the --out of an earlier one")
    definition = _with_options(definitions.with_arguments(definition, changes), args)
    cells = cells_of(definition)
    if recipe is None:
        assert before is not None
        chosen = Study(args.out, definition, cells, before.configs)
    else:
        chosen = Study(args.out, definition, cells, configs_of(definition, recipe, cells))
    _ = chosen.baseline  # an unknown one is refused before anything starts
    return chosen


def _written(text: str) -> tuple[Definition, Path]:
    """Return the definition of a study or recipe by name or path, and the recipe's file."""
    try:
        path = recipe_path(f"studies/{text}")
    except ConfigError:
        path = recipe_path(text)
    definition = definitions.read(path)
    if definition is None:
        return Definition(recipe=text), path
    beside = path.parent / definition.recipe
    return definition, beside if beside.is_file() else recipe_path(definition.recipe)


def _with_options(definition: Definition, args: argparse.Namespace) -> Definition:
    values: dict[str, object] = {}
    if args.seeds is not None:
        values["seeds"] = definitions.parse_seeds(args.seeds)
    if args.tie:
        values["tie"] = {**definition.tie, **dict(map(definitions.parse_tie, args.tie))}
    if args.threshold is not None:
        values["threshold"] = definitions.parse_threshold(args.threshold)
    if args.equivalence is not None:
        values["equivalence"] = definitions.parse_margin(args.equivalence)
    if args.baseline is not None:
        values["baseline"] = args.baseline
    if args.cold_start:
        values["cold_start"] = True
    return replace(definition, **values)  # pyright: ignore[reportArgumentType]


def _summarize(chosen: Study) -> int:
    """Write tables and plots of an existing study."""
    from evolver_async.study import output

    before = directory.existing(chosen.out)
    if before is None:
        raise ConfigError(f"{chosen.out}: holds no study (no {directory.DEFINITION})")
    directory.refuse_another(before, chosen)
    output.write(replace(before, definition=chosen.definition))
    say(f"written: {chosen.out / 'summary.md'}, cells.csv, curves.csv, plots/")
    return 0


def _print_plan(chosen: Study, jobs: int) -> None:
    """Print the number of runs, and the time and disk that those that are left need."""
    from evolver_async.study.study_progress import duration_text, needs

    states = [state_of(chosen, run)[0] for run in runs_of(chosen)]
    left = sum(state in OPEN for state in states)
    seeds, done = len(chosen.definition.seeds), states.count("finished")
    colds = open_cold_starts(chosen)
    say(
        f"{len(chosen.cells)} cells x {seeds} seeds = {len(states)} runs, {done} finished,"
        f" {states.count('failed')} failed, {left} to run"
        + (f" after {colds} cold start{'s' * (colds > 1)}" if colds and left else "")
    )
    if left == 0:
        return
    for name, config in chosen.configs.items():
        for line in ablation.lines(config):
            say(f"cell {name}: {line}", file=sys.stderr)
    expected = needs(chosen, jobs)
    if expected is None:
        say("estimate: unknown until the first run is finished", flush=True)
        return
    at_once = f" with --jobs {jobs}" if jobs > 1 else ""
    words = f"about {duration_text(expected.seconds)}{at_once}, {gib(expected.bytes)} of disk"
    say(f"estimate: {words} (each run as the first finished one)", flush=True)
    if shutil.disk_usage(chosen.out).free < expected.bytes:
        say(f"warning: {chosen.out} has less free space than that", file=sys.stderr)


def _run(chosen: Study, args: argparse.Namespace) -> int:
    """Run what is left of a study whose directory is locked; return the exit code."""
    from evolver_async.study import output
    from evolver_async.study.study_progress import StudyProgress

    if args.retry:
        forget_failures(chosen)
    _print_plan(chosen, args.jobs)
    scheduler = Scheduler(chosen, args.jobs, StudyProgress(chosen, args.jobs).report)
    complete = scheduler.run()
    output.write(chosen)
    states = [(run.name, *state_of(chosen, run)) for run in runs_of(chosen)]
    failed = [(name, error) for name, state, error in states if state == "failed"]
    for name, error in failed:
        say(f"failed: {name}: {error}", file=sys.stderr)
    say(f"summary: {chosen.out / output.SUMMARY}")
    again = f"evolver-async study --out {shlex.quote(str(chosen.out))}"
    if args.jobs > 1:
        again += f" --jobs {args.jobs}"
    if not complete or scheduler.stopped:
        say(f"stopped; continue: {again}")
    if failed:
        say(f"try the failed runs again: {again} --retry")
    if not complete:
        return 128 + scheduler.signals[0]
    return FAILED if failed or scheduler.stopped else 0
