"""Merging of trees of sections into a structured configuration, and its typed result.

Unknown keys and wrong types are a ConfigError that names the key.
"""

import copy
import difflib
import re
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass, replace
from functools import cache
from typing import Any, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evolver_async.config.secrets import (
    escaped,
    kept,
    note_references,
    refuse_written,
)
from evolver_async.config.sections import Config
from evolver_async.config.sections.reward import expanded
from evolver_async.config.sections.run import StageConfig
from evolver_async.config.values.config_error import ConfigError
from evolver_async.config.values.rules import item_kind, keys

NOT_A_CHOICE = re.compile(r"Invalid value '(.*)', expected one of \[(.*)\]", re.DOTALL)


def defaults() -> DictConfig:
    """Return the structured configuration of all defaults, for the caller to change."""
    return copy.deepcopy(_defaults())


@cache
def _defaults() -> DictConfig:
    return OmegaConf.structured(Config)  # four times as long as a copy


def apply(resolved: DictConfig, tree: dict[str, Any]) -> DictConfig:
    """Merge a tree of sections into `resolved`.

    A list of stages replaces the list. Another environment drops the parameters of the one before,
    and the sets of evaluation episodes that change them.
    """
    if "reward" in tree:
        tree = tree | {"reward": expanded(tree["reward"])}
    now = environment_name(resolved)
    if environment(tree).get("name", now) != now:
        resolved.env.params = {}
        for name in [one for one, chosen in resolved.eval.sets.items() if not chosen.env.name]:
            del resolved.eval.sets[name]
        for stage in resolved.stages:
            env = stage.override.get("env")
            if isinstance(env, DictConfig) and "name" not in env:
                env.pop("params", None)
    _drop_params_of_sets(resolved, tree)
    rest = {name: value for name, value in tree.items() if name != "stages"}
    merged = merge(resolved, rest, Config, "")
    if "stages" in tree:
        stages = tree["stages"]
        items = OmegaConf.to_container(stages) if OmegaConf.is_config(stages) else stages
        if not isinstance(items, list):
            raise ConfigError("stages: must be a list")
        merged.stages = [
            merge(OmegaConf.structured(StageConfig), staged(item), StageConfig, f"stages[{index}].")
            for index, item in enumerate(items)
        ]
    return merged


def staged(tree: Any) -> Any:
    """Return the tree of a stage with its `data`, a short form, as a section of its `override`."""
    if not isinstance(tree, dict) or "data" not in tree:
        return tree
    given = tree.get("override") or {}
    rest = {name: value for name, value in tree.items() if name != "data"}
    return rest | {"override": given | {"data": tree["data"]}}


def _drop_params_of_sets(resolved: DictConfig, tree: Any) -> None:
    """Drop the parameters of the sets for which `tree` names another environment."""
    sets = _mapping(_mapping(_mapping(tree).get("eval")).get("sets"))
    for name, chosen in resolved.eval.sets.items():
        named = environment(sets.get(name)).get("name", chosen.env.name)
        if named != chosen.env.name:
            chosen.env.params = {}


def structured(config: Config) -> DictConfig:
    """Return a resolved configuration as a structured one. References stay references."""
    return apply(defaults(), escaped(asdict(config)))


def override(config: Config, tree: dict[str, Any]) -> Config:
    """Return `config` with a tree of sections merged over it; unnamed sections are shared.

    Only the named sections are structured, which takes a twentieth of the time, unless a text of
    the tree or of these sections has `${`, or the tree names an environment.
    """
    named = [vars(config)[name] for name in tree if name in vars(config)]
    if "stages" in tree or "name" in environment(tree) or "${" in repr((tree, named)):
        return to_config(apply(structured(config), escaped(tree, ".override")))
    _refuse_unknown(tree, Config, "")
    changed = {}
    for name, values in tree.items():
        section: Any = getattr(config, name)
        node = merge(OmegaConf.structured(section), values, type(section), f"{name}.")
        changed[name] = OmegaConf.to_object(node)
    return replace(config, **changed)


def merge(base: DictConfig, tree: Any, kind: type, prefix: str) -> DictConfig:
    """Merge `tree` into `base`, a structured node of dataclass `kind` at key prefix `prefix`.

    A mapping of free keys that is empty in `tree` empties that of `base`.
    """
    _refuse_unknown(tree, kind, prefix)
    try:
        _empty(base, tree, kind)
        base.merge_with(tree)
    except OmegaConfBaseException as error:
        raise _explained(error, prefix) from None
    return base


def _empty(base: DictConfig, tree: Any, kind: type) -> None:
    """Empty the mappings of free keys for which `tree` has an empty one."""
    types = get_type_hints(kind)
    for name, value in tree.items():
        item = item_kind(types[name])
        if not isinstance(value, dict | DictConfig):
            continue
        if is_dataclass(types[name]):
            _empty(base[name], value, types[name])
        elif not value:
            base[name] = {}
        elif isinstance(item, type) and is_dataclass(item):
            for key, part in value.items():
                if key in base[name]:
                    _empty(base[name][key], part, item)


def to_config(resolved: DictConfig) -> Config:
    """Resolve everything except references to the environment in parameters of environments."""
    raw: Any = OmegaConf.to_container(resolved)
    refuse_written(raw)
    note_references(raw)
    resolved.env.params = kept(raw["env"]["params"])
    for part, plain in zip(resolved.tasks.mixture, raw["tasks"]["mixture"], strict=True):
        part.params = kept(plain["params"])
    for name, chosen in resolved.eval.sets.items():
        chosen.env.params = kept(raw["eval"]["sets"][name]["env"]["params"])
    for stage, plain in zip(resolved.stages, raw["stages"], strict=True):
        stage.override = kept(plain["override"])
    try:
        config = OmegaConf.to_object(resolved)
    except OmegaConfBaseException as error:
        raise _explained(error, "") from None
    assert isinstance(config, Config)
    return config


def environment(tree: Any) -> dict[str, Any]:
    """Return the `env` section of a tree, empty if it has none."""
    return _mapping(_mapping(tree).get("env"))


def _mapping(value: Any) -> Any:
    """Return `value` if it is a mapping, else an empty one."""
    return value if isinstance(value, dict | DictConfig) else {}


def environment_name(resolved: DictConfig) -> str:
    """Return the environment's name as written: no reference is followed."""
    raw: Any = OmegaConf.to_container(resolved.env)
    return raw["name"]


def _explained(error: OmegaConfBaseException, prefix: str) -> ConfigError:
    key = f"{prefix}{error.full_key or ''}".rstrip(".")
    if choice := NOT_A_CHOICE.search(str(error)):
        allowed = choice[2].replace("'", "")
        return ConfigError(f"{key}: must be one of {allowed}, is {choice[1]!r}")
    return ConfigError(f"{key}: {str(error).splitlines()[0]}")


def _refuse_unknown(tree: Any, kind: type, prefix: str) -> None:
    if not isinstance(tree, dict | DictConfig):
        raise ConfigError(f"{prefix.rstrip('.')}: must be a mapping, is {tree!r}")
    types = get_type_hints(kind)
    for name, value in tree.items():
        if name not in types:
            raise ConfigError(f"{prefix}{name}: unknown key{_hint(str(name), types, prefix)}")
        if get_origin(types[name]) is list and isinstance(value, dict | DictConfig):
            raise ConfigError(f"{prefix}{name}: must be a list, which is given whole, is {value!r}")
        if get_origin(types[name]) is dict and isinstance(value, list | ListConfig):
            raise ConfigError(f"{prefix}{name}: must be a mapping, is {value!r}")
        if is_dataclass(types[name]):
            _refuse_unknown(value, types[name], f"{prefix}{name}.")
        item = item_kind(types[name])
        if isinstance(item, type) and is_dataclass(item):
            for place, part in _items(value):
                _refuse_unknown(part, item, f"{prefix}{name}{place}.")


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the items of a list or of a mapping with their places in its key; none of others."""
    if isinstance(value, list | ListConfig):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    return [(f".{name}", part) for name, part in _mapping(value).items()]


def _hint(name: str, siblings: Iterable[str], prefix: str) -> str:
    """Suggest a sibling, or keys of that name in any section."""
    close = [f"{prefix}{one}" for one in difflib.get_close_matches(name, siblings, n=1)]
    leaves = {key: key.rpartition(".")[2] for key, _ in keys(Config)}
    exact = [key for key, leaf in leaves.items() if leaf == name]
    if exact or not close:
        near = difflib.get_close_matches(name, leaves.values(), n=1)
        close = exact or [key for key, leaf in leaves.items() if leaf in near]
    return f", did you mean {' or '.join(close[:3])}?" if close else ""
