"""Paths and names that a configuration holds. These functions alone look at the file system."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from evolver_async.config import hub
from evolver_async.config.secrets import reveal
from evolver_async.config.sections import Config
from evolver_async.config.sections.agentevolver import SUMMARISED
from evolver_async.config.sections.run import RunName
from evolver_async.config.shape import GGUF
from evolver_async.config.values.config_error import ConfigError
from evolver_async.config.values.rules import check_value

ROWS = ("path", "validation", "test")  # keys of `tasks` that name files of rows


def with_absolute_paths(config: Config) -> Config:
    """Make the paths absolute that a run reads again later, from another working directory too."""

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().resolve()) if path else ""

    def unless_id(path: str) -> str:
        return path if hub.is_id(path) else absolute(path)

    experience, profile = config.experience, config.questioning.profile
    embedder = experience.embedder
    embedder = absolute(embedder) if experience.loads_embedder else embedder
    return replace(
        with_task_paths(config, unless_id),
        policy=replace(config.policy, path=unless_id(config.policy.path)),
        experience=replace(experience, embedder=embedder),
        questioning=replace(
            config.questioning, profile=profile if profile == SUMMARISED else absolute(profile)
        ),
        weights=replace(config.weights, dir=absolute(config.weights.dir)),
        security=replace(config.security, keys=absolute(config.security.keys)),
    )


def with_task_paths(config: Config, change: Callable[[str], str]) -> Config:
    """Apply `change` to the files of rows of the run and to those that stages name."""
    of_run = {name: change(getattr(config.tasks, name)) for name in ROWS}
    tasks, stages = replace(config.tasks, **of_run), []
    for stage in config.stages:
        override = dict(stage.override)
        named = {name: one for name, one in override.get("tasks", {}).items() if name in ROWS}
        if named:
            changed = {name: change(reveal(str(one))) for name, one in named.items()}
            override["tasks"] = {**override["tasks"], **changed}
        stages.append(replace(stage, override=override))
    return replace(config, tasks=tasks, stages=stages)


def directory_of(config: Config, name: str) -> Path:
    """Return the absolute path of the directory of a run with this name."""
    return (Path(config.run.dir).expanduser() / name).resolve()


def embeds_by_model(config: Config) -> bool:
    """Return True if a process of the run loads what `experience.embedder` names, n-grams apart."""
    used = config.experience.pooled or config.questioning.kind == "llm"
    return used and config.experience.embedder != "hash"


def check_paths(config: Config) -> None:
    """Raise ConfigError for a path of the configuration that is missing or not writable."""
    _check_policy(config)
    embedder, loads = config.experience.embedder, config.experience.loads_embedder
    if embeds_by_model(config) and loads and not Path(embedder).is_dir():
        known = "hash, endpoint, a directory nor package.module:function"
        raise ConfigError(f"experience.embedder: {embedder} is neither {known}")
    if not Path(config.weights.dir).is_dir():
        raise ConfigError(f"weights.dir: {config.weights.dir} is not a directory")
    try:
        tempfile.TemporaryDirectory(dir=config.weights.dir).cleanup()
    except OSError as error:
        raise ConfigError(
            f"weights.dir: {config.weights.dir} cannot be written to: {error.strerror}"
        ) from None


def _check_policy(config: Config) -> None:
    """Raise ConfigError unless `policy.path` is a model, or one that a start can make or fetch."""
    path = Path(config.policy.path)
    if not config.policy.path:
        return
    if hub.is_id(config.policy.path):
        if not config.policy.download:
            hub.snapshot(config.policy)
        return
    if path.suffix == GGUF:
        if not path.is_file():
            raise ConfigError(f"policy.path: {path} does not exist")
        return
    if not path.is_dir():
        raise ConfigError(f"policy.path: {path} is not a directory")
    for name in hub.NEEDED:
        if not (path / name).is_file():
            raise ConfigError(f"policy.path: {path} has no {name}")


def check_name(key: str, name: str) -> None:
    """Raise ConfigError if a run cannot have this name."""
    if not name:
        raise ConfigError(f"{key}: must be a plain directory name, is empty")
    check_value(key, name, RunName)
