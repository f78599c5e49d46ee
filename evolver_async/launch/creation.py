"""Creation of a run directory: configuration, policy, tasks and exact values.

`.creating` marks a directory that is incomplete: a creation that was interrupted is taken over by
the next one, or completed by a resume.
"""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from evolver_async.buffer.stages import evaluation_digest, source_of
from evolver_async.buffer.tasks.data_files import data_rows, data_tasks
from evolver_async.buffer.tasks.row_files import rows_of
from evolver_async.buffer.tasks.rows import stored
from evolver_async.buffer.tasks.task_source import held_out_task
from evolver_async.checkpoint.checkpoints import exists
from evolver_async.config import Config, DataConfig, StageConfig, TasksConfig, hub
from evolver_async.config.load import dump, load_written, stage_as_written, stage_config
from evolver_async.config.paths import directory_of, with_absolute_paths
from evolver_async.config.values.config_error import ConfigError
from evolver_async.errors import USER_ERROR, Unrecoverable
from evolver_async.files import remove, write_whole
from evolver_async.launch.registry import resolve
from evolver_async.launch.run_directory import (
    CONVERTED,
    CREATING,
    EXACT,
    LOCK,
    last_error,
    last_lines,
    locked,
    record_format,
)
from evolver_async.launch.start_checks import check_start
from evolver_async.process.setup import RoleArgs
from evolver_async.process.stopping import handled_by, raise_stop

UNPREPARED = "the policy could not be prepared"
# Keys of `tasks` that decide which rows a stage has, and how they are read.
OF_ROWS = frozenset(("path", "validation", "test", "prompt", "split", "subset", "revision"))


def create(
    config: Config, recipe: Path | None, fill: Callable[[Path], None] = lambda _: None
) -> tuple[Config, Path]:
    """Make a run directory with its configuration and policy; remove it if that fails.

    Without `run.name` its name is that of the recipe and the time, and a number for a second run
    of the same second. A named directory whose creation was interrupted is taken over. `fill` puts
    into it what comes from another run.
    """
    check_start(config)
    config = resolve("formats")(config)  # before the preset's policy gets a path
    stem = recipe.stem if recipe is not None else "run"
    name, run_dir = _made(config, f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    _refuse_existing(run_dir)
    resolved = with_absolute_paths(config)
    starts = "always" if resolved.policy.path else "never"
    resolved = replace(
        resolved,
        run=replace(config.run, name=name),
        eval=replace(config.eval, at_start=starts)
        if config.eval.at_start == "auto"
        else config.eval,
        policy=replace(config.policy, path=resolved.policy.path or str(run_dir / "policy")),
    )
    # a signal raises, so that an incomplete directory is removed
    with locked(run_dir), handled_by(raise_stop):
        _refuse_existing(run_dir)  # another process may have made it before it was locked
        try:
            _clear(run_dir)
            fill(run_dir)
            resolved = with_snapshot(with_own_tasks(resolved, run_dir))
            record_format(run_dir)
            dump(resolved, run_dir / "config.yaml")
            resolved = complete(resolved, run_dir)
        except BaseException:
            with suppress(OSError):  # as of a mount point, which is left empty
                _clear(run_dir)  # the mark comes last: a second signal leaves it
                shutil.rmtree(run_dir)
            raise
    return resolved, run_dir


def _made(config: Config, default: str) -> tuple[str, Path]:
    """Make the directory of a run, a new one if the run has no name; return both."""
    name, numbers = config.run.name or default, count(2)
    while True:
        run_dir = directory_of(config, name)
        try:
            run_dir.mkdir(parents=True, exist_ok=bool(config.run.name))
            return name, run_dir
        except OSError as error:
            if config.run.name or not isinstance(error, FileExistsError):
                message = f"run.dir: cannot make {run_dir}: {error.strerror}"
                raise ConfigError(message) from None
        name = f"{default}-{next(numbers)}"


def _refuse_existing(run_dir: Path) -> None:
    """Raise ConfigError unless the directory is empty or its creation was interrupted."""
    if not (run_dir / CREATING).exists() and any(one.name != LOCK for one in run_dir.iterdir()):
        raise ConfigError(
            f"run.name: {run_dir} exists; choose another name, or continue with --resume {run_dir}"
        )


def _clear(run_dir: Path) -> None:
    """Mark the directory as incomplete; remove the files of an interrupted creation."""
    write_whole(run_dir / CREATING, "")
    for left in run_dir.iterdir():
        if left.name not in (CREATING, LOCK):
            remove(left)


def with_snapshot(config: Config) -> Config:
    """Name the directory and the commit of a hub's model, downloaded if need be, not its id; of a
    teacher the directory."""
    if hub.is_id(config.teacher.path):
        teacher = replace(config.policy, path=config.teacher.path, revision="")
        directory = hub.snapshot(teacher, "teacher.path")
        config = replace(config, teacher=replace(config.teacher, path=str(directory)))
    if not hub.is_id(config.policy.path):
        return config
    directory = hub.snapshot(config.policy)
    named = replace(config.policy, path=str(directory), revision=directory.name)
    return replace(config, policy=named)


def complete(config: Config, run_dir: Path) -> Config:
    """Make the files that a run directory needs beside its configuration; return this, with the
    precision that was decided and the directory that a .gguf file was converted to."""
    own = run_dir / "policy"
    whole = exists(run_dir / "checkpoints") or (run_dir / CREATING).read_text() == CONVERTED
    if config.policy.path == str(own) and own.exists() and not whole:
        remove(own)  # perhaps incomplete: its creation was interrupted
    _prepare(config, run_dir)
    config = replace(config, policy=load_written(run_dir, checked=False).policy)
    measure(config, run_dir)
    (run_dir / CREATING).unlink()
    return config


def check_changed(config: Config) -> None:
    """Check a changed configuration of a run as that of a new one is; write nothing of the run."""
    with tempfile.TemporaryDirectory() as place:
        dump(config, Path(place) / "config.yaml")
        _prepare(config, Path(place))


def with_own_tasks(config: Config, run_dir: Path) -> Config:
    """Put the rows of all task files into the run directory: a restart needs the same tasks, and no
    process reads the files again."""
    saved: dict[Path, str] = {}

    def own(tasks: TasksConfig | DataConfig) -> dict[str, str]:
        path = Path(tasks.path)
        if not tasks.path or (path.parent == run_dir and stored(path)):
            return {}
        rows = rows_of(tasks) if isinstance(tasks, TasksConfig) else data_rows(tasks)
        if rows.directory not in saved:
            names = (run_dir / f"tasks_{number}" for number in count())
            directory = next(name for name in names if not name.exists())
            rows.save(directory)
            saved[rows.directory] = str(directory)
        revision = rows.meta.revision or tasks.revision
        changed = {"path": saved[rows.directory], "revision": revision}
        return changed | {name: "" for name in ("validation", "test") if hasattr(tasks, name)}

    tasks, stages = replace(config.tasks, **own(config.tasks)), []
    data = replace(config.data, **own(config.data))
    for index, stage in enumerate(config.stages):
        override = dict(stage.override)
        if not {"path", "validation"}.isdisjoint(override.get("data", {})):
            written = stage_as_written(config, index).data
            override["data"] = override["data"] | own(written)
        if not OF_ROWS.isdisjoint(override.get("tasks", {})):
            changed = own(stage_as_written(config, index).tasks)
            kept = {name: one for name, one in changed.items() if getattr(TasksConfig, name) != one}
            rest = {n: one for n, one in override["tasks"].items() if n not in changed}
            override["tasks"] = rest | kept if changed else override["tasks"]
        stages.append(replace(stage, override=override))
    config = replace(config, tasks=tasks, data=data, stages=stages)
    return replace(config, stages=[_in_steps(config, index) for index in range(len(stages))])


def _in_steps(config: Config, index: int) -> StageConfig:
    """Return a stage with the steps that its epochs take."""
    stage = config.stages[index]
    if not stage.epochs:
        return stage
    staged = stage_config(config, index)
    data, weight = staged.data, staged.data.weight
    members = staged.rollout.group_size if weight else 0
    rows = data_tasks(data, staged.env.name, staged.env.params, members).count("train")
    steps = math.ceil(stage.epochs * rows / ((weight or 1) * staged.learner.groups_per_step))
    return replace(stage, steps=steps, epochs=0.0)


def measure(config: Config, run_dir: Path) -> None:
    """Write the success of the random and of the optimal policy on every stage's evaluations.

    Stages that evaluate alike share one computation. Stages whose environment cannot compute values
    have none, nor have agents, which play without it.
    """
    found: dict[str, dict[str, float] | None] = {}
    values = []
    for index in range(0 if config.rollout.agent else len(config.stages)):
        stage = stage_config(config, index)
        evaluations = evaluation_digest(stage)
        if evaluations not in found:
            found[evaluations] = _measured(stage)
        if (value := found[evaluations]) is not None:
            values.append({"stage": index, **value})
    (run_dir / EXACT).unlink(missing_ok=True)
    if values:
        write_whole(run_dir / EXACT, json.dumps({"values": values}))


def _measured(stage: Config) -> dict[str, float] | None:
    """Return the values of a stage over its evaluation's episodes; None if there are none."""
    source, rollout, episodes = source_of(stage), stage.rollout, stage.eval.episodes
    if not episodes:
        return None
    tasks = [held_out_task(source, number) for number in range(episodes)]
    found = resolve("exact")(tasks, rollout.max_turns * rollout.actions_per_turn)
    if found is None:
        return None
    values = {name: value for name, value in found._asdict().items() if value is not None}
    return {"episodes": float(episodes), **values}


def _prepare(config: Config, run_dir: Path) -> None:
    """Make the policy of the configuration in `run_dir`, or check it."""
    if config.launch.kind == "serial":
        _prepare_here(run_dir)
    else:
        _prepare_apart(run_dir)


def _prepare_here(run_dir: Path) -> None:
    """Make or check the policy in this process, which is to become the whole serial run.

    Raises ConfigError as `_prepare_apart` does.
    """
    arguments = RoleArgs(address="", name="prepare", incarnation=0, run_dir=run_dir)
    try:
        prepare = resolve("prepare")
        with _errors_alone("transformers"):  # the import sets its level
            prepare(arguments)
    except Unrecoverable as error:
        raise ConfigError(str(error)) from error
    except Exception as error:
        raise ConfigError(f"{UNPREPARED}: {type(error).__name__}: {error}") from error


@contextmanager
def _errors_alone(library: str) -> Iterator[None]:
    """Keep a library's warnings from the console; another process has a log file for them."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _prepare_apart(run_dir: Path) -> None:
    """Make or check the policy in a process of its own, as this one must not import torch.

    That process ends with this one. Raises ConfigError with its sentence if it refuses the
    configuration, and with the likely cause if it was killed.
    """
    log_file = run_dir / "logs" / "prepare.log"
    log_file.parent.mkdir(exist_ok=True)
    with open(log_file, "wb") as output:
        command = [sys.executable, "-m", "evolver_async.cli", "prepare", "--name", "prepare"]
        done = subprocess.run(
            [*command, "--run", str(run_dir), "--parent", str(os.getpid())],
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        cause = "; most likely memory ran out, see dmesg" if name == "SIGKILL" else ""
        raise ConfigError(f"{UNPREPARED}: the process was killed by {name}{cause}")
    if done.returncode == USER_ERROR:
        reason = last_error(log_file) or last_lines(log_file, 1)
        raise ConfigError(reason.partition("\n")[0])
    if done.returncode != 0:
        raise ConfigError(f"{UNPREPARED}: {last_lines(log_file, 1)}")
