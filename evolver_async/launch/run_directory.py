"""The run directory: created, locked by one launcher, resumed where that is sound.

`config.yaml` is the resolved configuration, `policy/` the model that training began with,
`exact.json` what the best possible policy would reach, `run.json` says how to reach a running job,
`lock` is held as long as one runs, `PAUSED` is there while the learner shall take nothing, and
`.creating` until the directory is complete: a creation that was cut short is taken over or resumed.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from evolver_async.buffer.actor_requests import source_of
from evolver_async.buffer.tasks.stream import held_out_task
from evolver_async.checkpoint import history
from evolver_async.checkpoint.directory import exists
from evolver_async.config import Config, ConfigError
from evolver_async.config.load import dump, load, stage_config
from evolver_async.config.paths import check_paths
from evolver_async.config.sections.channel import host_and_port
from evolver_async.config.sections.run import limit_reached
from evolver_async.errors import USER_ERROR
from evolver_async.launch.gpus import VISIBLE, check_seen
from evolver_async.launch.registry import check_wings, resolve
from evolver_async.metrics.wandb_process import has_key
from evolver_async.process.addresses import keys_of
from evolver_async.transport.keys import KeysError, check_keys
from evolver_async.transport.sockets import check_address
from evolver_async.weights.channel.base import listen

EXACT = "exact.json"
PAUSED = "PAUSED"
CREATING = ".creating"
LOCK = "lock"


def create(
    config: Config, recipe: Path | None, bring: Callable[[Path], None] = lambda _: None
) -> tuple[Config, Path]:
    """A new run directory with its configuration and policy; nothing is left of it when that fails.

    Without `run.name` it is called after the recipe and the time. A directory whose creation was
    cut short is taken over. `bring` puts into it what comes from another run.
    """
    _check(config)
    stem = recipe.stem if recipe is not None else "run"
    name = config.run.name or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = (Path(config.run.dir) / name).resolve()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir: {run_dir} cannot be made: {error.strerror}") from None
    _refuse_existing(run_dir)
    resolved = replace(
        config,
        run=replace(config.run, name=name),
        policy=replace(config.policy, path=config.policy.path or str(run_dir / "policy")),
        security=replace(config.security, keys=_absolute(config.security.keys)),
    )
    with locked(run_dir), _sigterm_raises():
        _refuse_existing(run_dir)  # another process may have made it before it was locked
        try:
            _clear(run_dir)
            bring(run_dir)
            resolved = _with_own_tasks(resolved, run_dir)
            dump(resolved, run_dir / "config.yaml")
            _complete(resolved, run_dir)
        except BaseException:
            shutil.rmtree(run_dir)
            raise
    return resolved, run_dir


def _refuse_existing(run_dir: Path) -> None:
    """ConfigError if the directory holds anything but what an interrupted creation left."""
    if not (run_dir / CREATING).exists() and any(one.name != LOCK for one in run_dir.iterdir()):
        raise ConfigError(
            f"run.name: {run_dir} exists; choose another name, or go on with --resume {run_dir}"
        )


def _clear(run_dir: Path) -> None:
    """Mark the directory as one that is being created; remove what an earlier creation left."""
    (run_dir / CREATING).touch()
    for left in run_dir.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        elif left.name not in (CREATING, LOCK):
            left.unlink()


def _complete(config: Config, run_dir: Path) -> None:
    """Make what a run directory needs beside its configuration."""
    own = run_dir / "policy"
    brought = exists(run_dir / "checkpoints")
    if config.policy.path == str(own) and own.exists() and not brought:
        shutil.rmtree(own)  # written in part by a creation that was cut short
    _prepare_policy(run_dir)
    _measure(config, run_dir)
    (run_dir / CREATING).unlink()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that a half-made directory is removed."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _with_own_tasks(config: Config, run_dir: Path) -> Config:
    """The configuration with copies of its files of tasks: a restart must find the same tasks."""
    copies: dict[str, str] = {}

    def copy_of(path: str) -> str:
        if path and path not in copies:
            copies[path] = str(run_dir / f"tasks_{len(copies)}.jsonl")
            shutil.copyfile(path, copies[path])
        return copies.get(path, "")

    tasks, stages = replace(config.tasks, path=copy_of(config.tasks.path)), []
    for stage in config.stages:
        override = dict(stage.override)
        if "path" in override.get("tasks", {}):
            override["tasks"] = {**override["tasks"], "path": copy_of(override["tasks"]["path"])}
        stages.append(replace(stage, override=override))
    return replace(config, tasks=tasks, stages=stages)


def resume(run_dir: Path, dotlist: Sequence[str], step: int | str | None = None) -> Config:
    """The configuration of an earlier run, with the changes of `dotlist` written into it.

    A run without a checkpoint starts at its beginning; `step` (or `best`) makes it go back to that
    checkpoint, and ends its pause. Raises ConfigError or CheckpointError where there is nothing
    that can be gone on with.
    """
    config = load(run_dir / "config.yaml", dotlist)
    incomplete = (run_dir / CREATING).exists()
    unmade = incomplete and config.policy.path == str(run_dir / "policy")
    _check(replace(config, policy=replace(config.policy, path="")) if unmade else config)
    before = load(run_dir / "config.yaml")
    _refuse_other_past(before, config)
    checkpoints = run_dir / "checkpoints"
    chosen = None
    if step is not None or exists(checkpoints):
        chosen, _ = history.choose(checkpoints, run_dir.name, step)
        check_goes_on(run_dir, before, config, history.numbers(chosen))
    if not incomplete:
        _measure(config, run_dir)
    if dotlist:
        part = run_dir / ".config.yaml"
        dump(config, part)
        part.replace(run_dir / "config.yaml")
    if step is not None and chosen is not None:
        history.go_back(checkpoints, chosen, lambda _: None)
        (run_dir / PAUSED).unlink(missing_ok=True)
    if incomplete:
        _complete(config, run_dir)
    return config


def check_goes_on(run_dir: Path, before: Config, after: Config, state: dict[str, Any]) -> None:
    """Raises ConfigError if there is nothing to train from this state of a learner on.

    Also for a change of a stage that is over, which could not act.
    """
    if not state:
        return
    stage, taken = state["stage"], state["take"] - state["stage_take"]
    for index, (old, new) in enumerate(zip(before.stages[:stage], after.stages, strict=False)):
        if old != new:
            raise ConfigError(
                f"stages[{index}]: is over at step {state['take']}, keep it as it was"
            )
    if stage >= len(after.stages):
        raise ConfigError(f"stages: the run is in stage {stage}, there are {len(after.stages)}")
    over = limit_reached(
        after.stages[stage],
        steps=taken,
        tokens=state["stage_tokens"],
        seconds=state["stage_seconds"],
        success=state["eval_success"],
    )
    last = stage + 1 == len(after.stages)
    if state["finished"] and over and last and not state["pending"]:
        raise ConfigError(
            f"{run_dir}: is finished; to go on, lengthen its last stage (stages.{stage}.steps=…),"
            " append one (stages+={kind: rl, steps: …}) or go back (--step N)"
        )


def _refuse_other_past(before: Config, after: Config) -> None:
    """Refuses to change what made the data that the journal holds.

    What was issued was chosen by seed and tasks: a restart chooses it again. What was sampled was
    sampled at a temperature: the learner scores it at the same one.
    """
    fixed = [
        (f"run.{item.name}", getattr(before.run, item.name), getattr(after.run, item.name))
        for item in fields(before.run)
    ]
    for index in range(min(len(before.stages), len(after.stages))):
        old, new = stage_config(before, index), stage_config(after, index)
        fixed += [
            (f"tasks.{item.name}", getattr(old.tasks, item.name), getattr(new.tasks, item.name))
            for item in fields(old.tasks)
        ]
        fixed.append(("rollout.temperature", old.rollout.temperature, new.rollout.temperature))
    for name, old, new in fixed:
        if old != new:
            raise ConfigError(f"{name}: a run that has begun keeps its {old}, {new} is of no use")


class Locked(ConfigError):
    """Another process holds the run directory."""


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run directory for this process. Raises Locked when another one holds it."""
    with open(run_dir / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(f"{run_dir}: is already running") from None
        yield


def announce(run_dir: Path, address: str) -> int:
    """Write where the buffer can be reached; returns how often this run was launched by now."""
    path = run_dir / "run.json"
    launches = json.loads(path.read_text())["launches"] + 1 if path.exists() else 1
    part = run_dir / ".run.json"
    part.write_text(json.dumps({"address": address, "pid": os.getpid(), "launches": launches}))
    part.replace(path)
    return launches


def address_of(run_dir: Path) -> str:
    """The buffer's address as announced. Raises ConfigError when the run was never launched."""
    try:
        return json.loads((run_dir / "run.json").read_text())["address"]
    except FileNotFoundError:
        raise ConfigError(f"{run_dir}: has no run.json, so it was never launched") from None


def pause(run_dir: Path, reason: str) -> None:
    """Have the learner stop before its next take, until `unpause`; also across restarts."""
    part = run_dir / f".{PAUSED}"
    part.write_text(reason, encoding="utf-8")
    part.replace(run_dir / PAUSED)


def pause_reason(run_dir: Path) -> str | None:
    """Why the run is paused; None when it is not."""
    try:
        return (run_dir / PAUSED).read_text(encoding="utf-8").strip() or "no reason given"
    except FileNotFoundError:
        return None


def unpause(run_dir: Path) -> str:
    """Let the learner go on; returns why it was paused. ConfigError when it was not."""
    reason = pause_reason(run_dir)
    if reason is None:
        raise ConfigError(f"{run_dir}: is not paused")
    (run_dir / PAUSED).unlink(missing_ok=True)
    return reason


def last_lines(path: Path, count: int = 5) -> str:
    """The end of a log."""
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join([line for line in lines if line.strip()][-count:])


def _check(config: Config) -> None:
    """Refuse what the configuration alone cannot tell, before anything is made."""
    check_paths(config)
    check_wings(config)
    check_addresses(config)
    check_seen(config, os.environ.get(VISIBLE))
    if config.metrics.wandb == "online" and not has_key():
        raise ConfigError("metrics.wandb: online needs a key: WANDB_API_KEY or ~/.netrc")


def check_addresses(config: Config) -> None:
    """Raises ConfigError for keys that are none, and for an address open to strangers or in use."""
    if config.launch.kind != "local":
        return
    keys = keys_of(config)
    addresses = {"buffer.address": config.buffer.address}
    if config.experience.kind != "none":
        addresses["experience.address"] = config.experience.address
    try:
        if keys is not None:
            check_keys(keys)
        for name, address in addresses.items():
            if address:
                _check_address(name, address, keys)
    except KeysError as error:
        raise ConfigError(f"security.keys: {error}") from None
    if config.weights.address:
        try:
            listen(*host_and_port(config.weights.address)).close()
        except OSError as error:
            raise ConfigError(f"{error.strerror}") from None


def _check_address(name: str, address: str, keys: Path | None) -> None:
    try:
        check_address(address, keys)
    except KeysError:
        raise
    except ValueError as error:
        raise ConfigError(str(error).replace("buffer.address", name, 1)) from None
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve()) if path else ""


def _measure(config: Config, run_dir: Path) -> None:
    """Write what the random and the optimal policy reach on the maps of the last evaluation.

    Nothing is written where the environment cannot compute it.
    """
    last = stage_config(config, len(config.stages) - 1)
    source = source_of(last)
    episodes = config.eval.final_episodes or config.eval.episodes
    tasks = [held_out_task(source, number) for number in range(episodes)]
    rollout = last.rollout
    values = resolve("exact")(tasks, rollout.max_turns * rollout.actions_per_turn)
    (run_dir / EXACT).unlink(missing_ok=True)
    if values is not None:
        content = {"random": values.random, "optimal": values.optimal, "episodes": episodes}
        if values.random_return is not None and values.optimal_return is not None:
            content["random_return"] = values.random_return
            content["optimal_return"] = values.optimal_return
        (run_dir / EXACT).write_text(json.dumps(content))


def _prepare_policy(run_dir: Path) -> None:
    """In a process of its own, because it needs torch and its caller does not.

    It ends with this one. It refuses a configuration in one sentence; if it is killed the likely
    cause is named; any other error is about the model.
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
        raise ConfigError(
            f"the process that loads and checks the model was killed by {name}{cause}"
        )
    if done.returncode == USER_ERROR:
        _, _, sentence = last_lines(log_file, 1).partition(": ")  # behind time, level and logger
        raise ConfigError(sentence)
    if done.returncode != 0:
        raise ConfigError(f"policy.path: {last_lines(log_file, 1)}")
