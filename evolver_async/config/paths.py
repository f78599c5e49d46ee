"""Paths and names that a configuration holds. These functions alone look at the file system."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from evolver_async.config import hub
from evolver_async.config.effective.changes import value_of, with_values
from evolver_async.config.scopes import named
from evolver_async.config.secrets import reveal
from evolver_async.config.sections import Config
from evolver_async.config.sections.run import RunName
from evolver_async.config.shape import GGUF
from evolver_async.config.values.config_error import ConfigError
from evolver_async.config.values.rules import FilePath, check_value, keys, mark
from evolver_async.extension import is_own

PATHS = {key: path for key, one in keys(Config) if (path := mark(one, FilePath))}


def with_absolute_paths(config: Config) -> Config:
    """Make the paths absolute that a run reads again later, from another working directory too."""

    def absolute(path: str, kind: FilePath) -> str:
        imported, of_hub = kind.own and is_own(path), kind.hub and hub.is_id(path)
        if path in ("", *kind.but) or imported or of_hub:
            return path
        return str(Path(path).expanduser().resolve())

    return with_paths(config, absolute)


def with_paths(config: Config, change: Callable[[str, FilePath], str]) -> Config:
    """Apply `change` to the paths of the run and to those that stages name."""
    stages = []
    for stage in config.stages:
        override = dict(stage.override)
        for key in named(override):
            if path := PATHS.get(key):
                section, name = key.split(".")
                changed = change(reveal(str(override[section][name])), path)
                override[section] = override[section] | {name: changed}
        stages.append(replace(stage, override=override))
    changed = {key: change(value_of(config, key), path) for key, path in PATHS.items()}
    return replace(with_values(config, changed), stages=stages)


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
    for key, path in (
        ("reward.model.path", config.reward.model.path),
        ("reward_model.path", config.reward_model.path),
    ):
        if path and not (Path(path) / "config.json").is_file():
            raise ConfigError(f"{key}: {path} is no directory of a model")
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
