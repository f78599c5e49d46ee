"""Fork: a new run from a checkpoint of another run, which stays as it is."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evolver_async.buffer.stages import evaluation_digest
from evolver_async.checkpoint import history
from evolver_async.checkpoint.checkpoints import CheckpointError, Manifest
from evolver_async.config import Config, ConfigError
from evolver_async.config.load import stage_as_written
from evolver_async.config.paths import check_name, with_absolute_paths
from evolver_async.config.secrets import escaped
from evolver_async.file_formats import CHECKPOINT_FORMAT
from evolver_async.launch.creation import create
from evolver_async.launch.registry import resolve
from evolver_async.launch.resumption import check_continues, check_weights, choose
from evolver_async.launch.run_directory import config_of, origin_of, record_origin


def fork(
    run_dir: Path, name: str, dotlist: Sequence[str], step: int | str | None
) -> tuple[Config, Path]:
    """Make a run directory beside `run_dir` (or in `run.dir`); return its configuration and path.

    It starts with the chosen checkpoint (step 0 needs none: it can be the old run's beginning), the
    policy, the tasks and the experience of the old run. Its journal is new: takes, versions and
    lineages count from 0 again; stages continue where they were, and the pool of synthetic tasks is
    empty. Raises ConfigError or CheckpointError.
    """
    before = with_absolute_paths(config_of(run_dir, checked=False))
    beside = json.dumps(escaped(str(run_dir.parent)), ensure_ascii=False)  # quoted for YAML, too
    config = with_absolute_paths(config_of(run_dir, [f"run.dir={beside}", *dotlist]))
    check_name("--fork", name)
    if config.run.name != before.run.name:
        raise ConfigError("run.name: cannot be set with --fork, which names the new run")
    chosen, manifest = _beginning(run_dir) if step == 0 else choose(run_dir, step)
    check_weights(before, config, manifest.files, "in a fork")
    state = history.numbers(chosen) if chosen is not None else {}
    check_continues(run_dir, before, config, state and state | {"pending": []})  # `_start_anew`
    own_policy = config.policy.path == str(run_dir / "policy")
    pairs = zip(_evaluations_of(before), _evaluations_of(config), strict=False)
    comparable = all(old == new for old, new in pairs)

    def fill(made: Path) -> None:
        if own_policy:
            shutil.copytree(run_dir / "policy", made / "policy")
        record_origin(made, kind="fork", run=str(run_dir), step=manifest.step)
        if (run_dir / "experience").is_dir():
            resolve("copy_pool")(run_dir / "experience", made / "experience")
        if chosen is None:
            return
        first = history.copy(chosen, manifest.files, made / "checkpoints", made.name, _start_anew)
        if not comparable:
            (first / history.EVALUATION).unlink(missing_ok=True)

    policy = replace(config.policy, path="" if own_policy else config.policy.path)
    return create(replace(config, run=replace(config.run, name=name), policy=policy), None, fill)


def _beginning(run_dir: Path) -> tuple[Path | None, Manifest]:
    """Return the checkpoint of step 0; None if there is none and the run began with its policy."""
    try:
        return choose(run_dir, 0)
    except CheckpointError:
        if origin_of(run_dir) is not None:  # it began with a checkpoint of another run
            raise
        return None, Manifest(format=CHECKPOINT_FORMAT, run_id=run_dir.name, step=0, files={})


def _evaluations_of(config: Config) -> list[str]:
    """Return the identity of every stage's evaluations."""
    return [evaluation_digest(stage_as_written(config, i)) for i in range(len(config.stages))]


def _start_anew(state: dict[str, Any]) -> None:
    """Reset a learner's numbers to those of a run that has taken no groups yet."""
    taken = state["take"] - state["stage_take"]
    env_steps = state["env_steps"] + state["explored_turns"]  # a new buffer counts from 0
    state.update(lineage=0, take=0, version=0, pending=[], rollbacks=0)
    state.update(changed_take=0, stage_take=-taken, env_steps=env_steps, explored_turns=0)
