"""Plan of a rerun: the steps that are trained again, and on which data and weights.

A rerun needs one process: takes come from the run's journal, weights from its checkpoints or its
initial policy. This module decides and checks; the learner trains (role `rerun`). The directory of
the run is only read.
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from evolver_async.buffer.state.groups import Take
from evolver_async.checkpoint import checkpoints as checkpoint
from evolver_async.config import Config, ConfigError
from evolver_async.config.load import dump
from evolver_async.config.rerun_changes import (
    changed_keys,
    changes_beginning,
    changes_stage,
    refuse_data_changes,
)
from evolver_async.files import write_whole
from evolver_async.launch.run_directory import (
    EXACT,
    config_of,
    facts_of,
    origin_of,
    record_format,
    record_origin,
)
from evolver_async.runs.results.loaded_run import RunResults
from evolver_async.runs.results.takes import RecordedTakes

KEEP_ALL = "buffer.archive=all keeps every segment of a run"


@dataclass(frozen=True)
class RerunPlan:
    """Takes `begin` to `last` of a run, trained again from the state before `begin`.

    `start`: the checkpoint with that state, None for the beginning of the run. `changed`: the
    configuration from take `first` on; None for an exact repetition, which is compared with the
    run. `out`: the run directory that the changed training writes.
    """

    results: RunResults
    begin: int
    first: int
    last: int
    start: Path | None
    changed: Config | None
    out: Path | None

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return self.results.config

    @cached_property
    def takes(self) -> RecordedTakes:
        return RecordedTakes(self.results.history, self.results.journal)

    @cached_property
    def line(self) -> dict[int, Take]:
        """The complete takes of the run, by number."""
        return self.takes.complete

    @cached_property
    def rows(self) -> dict[int, dict[str, Any]]:
        """The rows of the run's learner steps, by take."""
        return {row["step"] - 1: row for row in self.results.steps.rows}

    def begins_stage(self, number: int) -> bool:
        """Return True if a take is the first one of its stage."""
        before = self.line.get(number - 1)
        return number == 0 or (before is not None and before.stage != self.line[number].stage)

    def version(self, number: int) -> int | None:
        """Return the run's version after a take; None if it is not recorded."""
        if number not in self.line:
            return None
        version, later = self.line[number].version, self.line.get(number + 1)
        if version is None and later is not None and later.head is not None:
            return later.head.step  # a learner that died before its report
        return version

    def rollbacks(self, number: int) -> int:
        """Return the rollbacks of the stage before a take, which its row tells."""
        return int(self.rows.get(number, {}).get("safety/rollbacks") or 0)


def plan(
    results: RunResults,
    changes: Sequence[str],
    steps: tuple[int, int] | None = None,
    out: Path | None = None,
) -> RerunPlan:
    """Plan the rerun of `steps` (the first and the last one), by default of all complete ones.

    With `changes` they are trained with other settings, else as the run trained them. ConfigError,
    which names a key, step, group or checkpoint, if that is impossible.
    """
    ranks = results.config.learner.ranks
    if ranks > 1:
        raise ConfigError(
            f"learner.ranks: the run had {ranks}, which sum in another order than the one process"
            " of a rerun; only runs of one rank can be rerun"
        )
    if out is not None and not changes:
        raise ConfigError("--out: needs changes; a rerun without any only compares")
    whole = RerunPlan(results, 0, 0, 0, None, None, None)
    if not whole.line:
        raise ConfigError(
            results.missing or f"{results.path}: its journal has no complete step yet"
        )
    first, last = _bounds(whole, steps)
    start, begin = _start(whole, first)
    _check_data(whole, begin, last)
    made = RerunPlan(results, begin, first, last, start, None, None)
    if not changes:
        return made
    return replace(made, changed=_changed(made, changes), out=_directory(made, out))


def make_directory(made: RerunPlan) -> None:
    """Make the run directory of a changed rerun, with its configuration and its origin."""
    assert made.out is not None and made.changed is not None
    source, out = made.results.path, made.out
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out: cannot make {out}: {error.strerror}") from None
    own = made.changed.policy.path == str(source / "policy")
    if own:
        shutil.copytree(source / "policy", out / "policy")
    if (exact := facts_of(source / EXACT)) is not None:
        write_whole(out / EXACT, json.dumps(exact))
    record_format(out)
    run = replace(made.changed.run, name=out.name, dir=str(out.parent))
    path = str(out / "policy") if own else made.changed.policy.path
    dump(
        replace(made.changed, run=run, policy=replace(made.changed.policy, path=path)),
        out / "config.yaml",
    )
    record_origin(
        out,
        kind="rerun",
        run=str(source),
        steps=[made.first + 1, made.last + 1],
        checkpoint="" if made.start is None else made.start.name,
        changes=changed_keys(made.config, made.changed),
    )


def _bounds(whole: RerunPlan, steps: tuple[int, int] | None) -> tuple[int, int]:
    """Return the first and the last take of the steps."""
    newest = max(whole.line)
    if steps is None:
        return 0, newest
    first, last = steps[0] - 1, steps[1] - 1
    if last > newest:
        raise ConfigError(f"--steps: {last + 1}: the run's last complete step is {newest + 1}")
    return first, last


def _start(whole: RerunPlan, first: int) -> tuple[Path | None, int]:
    """Return the newest checkpoint at or before take `first`, None for the beginning; its take."""
    results = whole.results
    found = checkpoint.resumable(results.path / "checkpoints")
    earlier = [(path, manifest) for path, manifest in found if manifest.step <= first]
    if earlier:
        path, manifest = earlier[-1]
        checkpoint.verify(path, manifest.run_id)
        return path, manifest.step
    origin = origin_of(results.path)
    if origin is not None:
        newest = max(whole.line)
        kept = sorted({manifest.step for _, manifest in found if manifest.step <= newest})
        later = f"; --steps {kept[0] + 1}..N begins at its first kept checkpoint" if kept else ""
        raise ConfigError(
            f"{results.path}: has no checkpoint at or before step {first + 1}, and its initial"
            f" weights came from {origin.run}{later}"
        )
    return None, 0


def _check_data(whole: RerunPlan, begin: int, last: int) -> None:
    """Raise ConfigError, naming the first missing step or group, unless all data is kept."""
    archive = whole.results.config.buffer.archive
    for number in range(begin, last + 1):
        lost = "its take"
        if number in whole.line:
            group = whole.takes.missing(number)
            if group is None:
                continue
            lost = f"group {group}"
        raise ConfigError(
            f"step {number + 1}: {lost} is no longer in the journal of {whole.results.path}"
            f" (buffer.archive={archive}); {KEEP_ALL}{_alternative(whole, number)}"
        )


def _alternative(whole: RerunPlan, gone: int) -> str:
    """Name the first step behind `gone` that could be trained again; "" if there is none."""
    newest = max(whole.line)
    for _, manifest in checkpoint.resumable(whole.results.path / "checkpoints"):
        takes = range(manifest.step, newest + 1)
        whole_data = (n in whole.line and whole.takes.missing(n) is None for n in takes)
        if gone < manifest.step <= newest and all(whole_data):
            return f"; --steps {manifest.step + 1}..{newest + 1} is possible"
    return ""


def _changed(made: RerunPlan, changes: Sequence[str]) -> Config:
    """Return the configuration with the changes. ConfigError for one that cannot act."""
    before = made.config
    after = config_of(made.results.path, changes)
    refuse_data_changes(before, after)
    numbers = range(made.first, made.last + 1)
    stages = {(made.line[number].stage, made.rollbacks(number)) for number in numbers}
    begun = {made.line[number].stage for number in numbers if made.begins_stage(number)}
    if not any(changes_stage(before, after, *stage) for stage in stages) and not any(
        changes_beginning(before, after, stage) for stage in begun
    ):
        raise ConfigError(
            f"{' '.join(changes)}: changes nothing in steps {made.first + 1} to {made.last + 1}:"
            " the run has trained them with these values, or a stage overrides them"
        )
    return after


def _directory(made: RerunPlan, out: Path | None) -> Path:
    """Return the directory to make. ConfigError if it exists."""
    if out is None:
        source = made.results.path
        out = source.parent / f"{source.name}-rerun-{time.strftime('%Y%m%d-%H%M%S')}"
    if out.exists():
        raise ConfigError(f"--out: {out} exists; choose another directory")
    return out.resolve()
