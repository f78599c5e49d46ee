"""Resumption of a run: changes of its configuration, its checkpoint, and what must not change."""

import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from evolver_async.buffer.log.quarantine import JournalError
from evolver_async.buffer.log.reader import JournalReader
from evolver_async.checkpoint import history
from evolver_async.checkpoint.checkpoints import (
    CheckpointError,
    NoCheckpointError,
    exists,
    resumable,
    valid,
    verify,
)
from evolver_async.config import Config
from evolver_async.config.effective.changes import effective, value_of
from evolver_async.config.load import dump, load_written, stage_as_written, stage_config
from evolver_async.config.paths import with_absolute_paths
from evolver_async.config.scopes import keys_of
from evolver_async.config.sections.learner import lr_at
from evolver_async.config.sections.run import limits_reached
from evolver_async.config.shape import GGUF
from evolver_async.config.values.config_error import ConfigError
from evolver_async.config.values.rules import Scope
from evolver_async.launch.creation import (
    check_changed,
    complete,
    measure,
    with_own_tasks,
    with_snapshot,
)
from evolver_async.launch.run_directory import ACTORS, CREATING, PAUSED, config_of, origin_of
from evolver_async.launch.start_checks import check_start

RISE = 1.01  # factor by which a learning rate must rise to be reported
CRITIC = "critic."  # beginning of the names of a critic's files in a checkpoint, and of its keys


class FinishedRun(ConfigError):
    """A run that has nothing left to train."""


def resume(run_dir: Path, dotlist: Sequence[str], step: int | str | None = None) -> Config:
    """Write the changes of `dotlist` into the configuration of an earlier run and return it.

    A run without a checkpoint starts at its beginning; `step` (or `best`) makes it go back to that
    checkpoint and ends its pause. A run that was moved gets its paths as they are now. The number
    of actors that `scale` asked the earlier launch for is forgotten. Raises ConfigError or
    CheckpointError if the run cannot continue.
    """
    # first of all, as `scale` asks a launch for actors from its lock on
    (run_dir / ACTORS).unlink(missing_ok=True)
    config = with_absolute_paths(config_of(run_dir, dotlist))
    incomplete = (run_dir / CREATING).exists()
    if config.policy.path.endswith(GGUF) and not incomplete:
        raise ConfigError("policy.path: a .gguf file is converted only when a run is created")
    config = with_snapshot(config)
    no_policy = incomplete and config.policy.path == str(run_dir / "policy")
    check_start(replace(config, policy=replace(config.policy, path="")) if no_policy else config)
    before = with_absolute_paths(config_of(run_dir, checked=False))
    _refuse_changed_data(before, config)
    checkpoints = run_dir / "checkpoints"
    chosen = None
    if step is not None or exists(checkpoints):
        chosen, manifest = choose(run_dir, step)
        check_weights(before, config, manifest.files, "on resume")
        check_continues(run_dir, before, config, history.numbers(chosen))
    if config != before:
        _refuse_changed_replay(before, config, run_dir / "journal")
        if not incomplete and config.policy.path:
            check_changed(config)
    if not incomplete:
        measure(config, run_dir)
    config = with_own_tasks(config, run_dir)
    if config != load_written(run_dir, checked=False):
        dump(config, run_dir / "config.yaml")
    if step is not None and chosen is not None:
        history.go_back(checkpoints, chosen, lambda _: None)
        (run_dir / PAUSED).unlink(missing_ok=True)
    if incomplete:
        config = complete(config, run_dir)
    return config


def choose(run_dir: Path, step: int | str | None) -> history.Found:
    """Return the verified checkpoint of a step, the `best`, or with None the newest.

    Raises CheckpointError, with the command that does without it where no other one is left.
    """
    checkpoints = run_dir / "checkpoints"
    try:
        return history.choose(checkpoints, run_dir.name, step)
    except NoCheckpointError as error:
        raise NoCheckpointError(f"{error}; {_way_on(run_dir)}") from None


def _way_on(run_dir: Path) -> str:
    """Return the command by which a run without a usable newest checkpoint can go on, in words."""
    command = "evolver-async train --resume"
    run = shlex.quote(str(run_dir))
    for path, manifest in reversed(valid(run_dir / "checkpoints")):  # those that the run has left
        with suppress(CheckpointError):
            verify(path, run_dir.name)
            return f"an earlier one is intact: {command} {run} --step {manifest.step}"
    origin = origin_of(run_dir)
    if origin is None:
        way = f"begin anew with the first model of this run: {command} {run} --fork NAME --step 0"
    elif origin.kind == "fork":
        earlier = shlex.quote(origin.run)
        way = f"fork its origin again: {command} {earlier} --fork NAME --step {origin.step}"
    else:
        way = "train it again as it was trained, by rerun"
    return f"put an intact copy in its place, or {way}"


def check_weights(before: Config, after: Config, files: Iterable[str], where: str) -> None:
    """Raise ConfigError for a change that the weights of a checkpoint do not permit.

    files: of the checkpoint; only one with a critic determines its kind. where: `on resume` or
    `in a fork`, for the message.
    """
    has_critic = any(name.startswith(CRITIC) for name in files)
    keys = (key for key in keys_of(Scope.WEIGHTS) if has_critic or not key.startswith(CRITIC))
    _refuse_changes(before, after, keys, where)


def _refuse_changes(before: Config, after: Config, keys: Iterable[str], where: str) -> None:
    for key in keys:
        if (old := value_of(before, key)) != (new := value_of(after, key)):
            raise ConfigError(
                f"{key}: cannot change {where}: the run was started with {old}, got {new}"
            )


def check_continues(run_dir: Path, before: Config, after: Config, state: dict[str, Any]) -> None:
    """Raise ConfigError if nothing is left to train from this state of a learner.

    A change of a stage that is over is refused too, as it could have no effect.
    """
    if not state:
        return
    stage, taken = state["stage"], state["take"] - state["stage_take"]
    for index, (old, new) in enumerate(zip(before.stages[:stage], after.stages, strict=False)):
        if old != new:
            raise ConfigError(
                f"stages[{index}]: cannot change, as it is over at step {state['take']}"
            )
    if stage >= len(after.stages):
        raise ConfigError(
            f"stages: must keep stage {stage}, in which the run is; got {len(after.stages)} stages"
        )
    over = limits_reached(
        after.stages[stage],
        steps=taken,
        tokens=state["stage_tokens"],
        seconds=state["stage_seconds"],
        success=state["eval_success"],
    )
    done = {
        "steps": taken,
        "tokens": state["stage_tokens"],
        "hours": state["stage_seconds"] / 3600,
    }
    old_limits, limits = vars(before.stages[stage]), vars(after.stages[stage])
    changed = [key for key in done if key in over and limits[key] != old_limits[key]]
    for key in [] if state["finished"] else changed:
        raise ConfigError(
            f"stages[{stage}].{key}: must be more than {done[key]:.9g}, which the stage has"
            f" trained already, is {limits[key]:.9g}; it can end sooner only"
            " if the run goes back (--step N)"
        )
    last = stage + 1 == len(after.stages)
    if state["finished"] and over and last and not state["pending"]:
        limits = " and ".join(f"stages.{stage}.{key}=…" for key in over)
        raise FinishedRun(
            f"{run_dir}: is finished; to continue, lengthen its last stage ({limits}), append one"
            " (stages+={kind: rl, steps: …}) or go back (--step N)"
        )


def raised_rate(before: Config, after: Config, run_dir: Path) -> list[str]:
    """Describe a learning rate that rises because the stage in training has other steps than
    `before`.

    Only a changed schedule is reported, not a requested change of the section `learner`. The run
    continues from its newest checkpoint. It keeps the changed steps: a decay to their end is what a
    stage of that many steps has.
    """
    found = resumable(run_dir / "checkpoints")
    state = history.numbers(found[-1][0]) if found else {}
    if not state or not (done := state["take"] - state["stage_take"]):
        return []
    index = state["stage"]
    if stage_as_written(before, index).learner != stage_as_written(after, index).learner:
        return []
    stage = stage_config(after, index, state["rollbacks"])
    steps = after.stages[index].steps
    # of the same step: what the stage had next, or had in the end, and what it has now
    was = lr_at(done, stage.learner, steps=before.stages[index].steps)
    rate = lr_at(done, stage.learner, steps=steps)
    if rate <= RISE * was:
        return []
    key = f"stages.{index}.override.learner"
    lr = was / stage.safety.rollback_lr ** state["rollbacks"]
    return [
        f"stages[{index}].steps: learner.lr rises from {was:.3g} to {rate:.3g}, as {steps} steps"
        f" have a longer schedule; to go on at {was:.3g}: {key}.lr={lr:.3g} {key}.decay=none"
    ]


def _refuse_changed_data(before: Config, after: Config) -> None:
    """Raise ConfigError for a change of a key that shaped the data in the journal.

    A restart chooses the same tasks again by seed and tasks; the learner computes log-probs at the
    temperature at which the tokens were sampled.
    """
    for index in range(min(len(before.stages), len(after.stages))):
        old, new = stage_as_written(before, index), stage_as_written(after, index)
        _refuse_changes(old, new, keys_of(Scope.DATA), "on resume")


def _refuse_changed_replay(before: Config, after: Config, journal: Path) -> None:
    """Raise ConfigError for a change of a key by which the buffer replays the journal.

    Only stages of which the journal has records have begun. A damaged journal refuses nothing: the
    buffer reports the damage.
    """
    try:
        begun = 1 + JournalReader(journal).newest_stage()
    except JournalError:
        return
    if begun > len(after.stages):
        raise ConfigError(
            f"stages: cannot be less than {begun} on resume: the journal has records of so many,"
            f" got {len(after.stages)}; a fork (--step N --fork NAME) can drop them"
        )
    for index in range(min(begun, len(before.stages))):
        old, new = _replayed(before, index), _replayed(after, index)
        for name, value in old.items():
            if value != new[name]:
                raise ConfigError(
                    f"{name}: cannot change on resume, as stage {index} has begun with {value}, got"
                    f" {new[name]}; a fork (--fork NAME) can change it"
                )


def _replayed(config: Config, index: int) -> dict[str, Any]:
    """Return the keys of a stage by which the buffer replays its records.

    A change of `rollout.guided` matters only to or from the rule that queues failed tasks again,
    one of `env.params` only if stages get or lose equal ones: a stage forgets the tasks of others.
    """
    stage = effective(stage_as_written(config, index), config.stages[index])
    named = {key: value_of(stage, key) for key in keys_of(Scope.REPLAY)}
    tasks = [_tasks(stage_as_written(config, number)) for number in range(index + 1)]
    equal = tasks.index(tasks[-1])
    named["env.params"] = f"the tasks of stage {equal}" if equal < index else "tasks of its own"
    if weight := stage.data.weight:  # the ids of its groups' tasks depend on their size
        share = "all groups" if weight == 1 else "a share of the groups"
        named["data.weight"] = f"{share}, of up to {stage.rollout.group_size} rows"
    else:
        named["data.weight"] = "no rows"
    if stage.rollout.guided != "failed":
        named["rollout.guided"] = "fixed or adaptive"
    return {f"stages[{index}].kind": config.stages[index].kind, **named}


def _tasks(config: Config) -> Any:
    """Return what the ids of a stage's tasks name, as `TaskSource.named`."""
    return (
        config.data.path,
        config.tasks.path,
        config.tasks.mixture or (config.env.name, config.env.params),
    )
