"""Merging of trees of sections over a configuration, whose values have the types of their keys.

Unknown keys and wrong types are a ConfigError that names the key. A text with a reference (`${`)
stays as it is until `resolved`, which leaves references to OmegaConf.
"""

import difflib
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evolver_async.config.secrets import escaped, kept, note_references, refuse_written
from evolver_async.config.sections import Config
from evolver_async.config.sections.reward import expanded
from evolver_async.config.values.config_error import ConfigError
from evolver_async.config.values.rules import (
    OneOf,
    Pattern,
    annotations,
    item_kind,
    keys,
    mark,
    unwrapped,
)

Section = TypeVar("Section")
WORDS = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}
TRUE, FALSE = ("yes", "y", "on", "true"), ("no", "n", "off", "false")


def apply(config: Config, tree: dict[str, Any]) -> Config:
    """Merge a tree of sections over `config`, as `merge` does.

    Another environment drops the parameters of the one before, and the sets of evaluation episodes
    that change them.
    """
    if "reward" in tree:
        tree = tree | {"reward": expanded(tree["reward"])}
    if isinstance(tree.get("stages"), list):
        tree = tree | {"stages": [staged(stage) for stage in tree["stages"]]}
    if environment(tree).get("name", config.env.name) != config.env.name:
        config = _without_parameters(config)
    given = _mapping(_mapping(tree.get("eval")).get("sets"))
    renamed = {
        name: replace(chosen, env=replace(chosen.env, params={}))
        for name, chosen in config.eval.sets.items()
        if environment(given.get(name)).get("name", chosen.env.name) != chosen.env.name
    }
    if renamed:
        config = replace(config, eval=replace(config.eval, sets=config.eval.sets | renamed))
    return merge(config, tree, "")


def staged(tree: Any) -> Any:
    """Return the tree of a stage with its `data`, a short form, as a section of its `override`."""
    if not isinstance(tree, dict) or "data" not in tree:
        return tree
    given = tree.get("override") or {}
    rest = {name: value for name, value in tree.items() if name != "data"}
    return rest | {"override": given | {"data": tree["data"]}}


def _without_parameters(config: Config) -> Config:
    """Drop the parameters of the run's environment, and what stages and sets change of them."""
    stages = [
        stage
        if "name" in environment(stage.override)
        else replace(stage, override=without_parameters(stage.override))
        for stage in config.stages
    ]
    sets = {name: chosen for name, chosen in config.eval.sets.items() if chosen.env.name}
    env, eval_ = replace(config.env, params={}), replace(config.eval, sets=sets)
    return replace(config, env=env, eval=eval_, stages=stages)


def without_parameters(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree of sections without parameters of its environment."""
    if "params" not in environment(tree):
        return tree
    return tree | {"env": {name: one for name, one in tree["env"].items() if name != "params"}}


def override(config: Config, tree: dict[str, Any]) -> Config:
    """Return `config` with a tree of sections merged over it; unnamed sections are shared."""
    if "${" not in repr(tree):
        return apply(config, tree)
    text = merge(Config(), escaped(asdict(config)), "")
    return resolved(apply(text, escaped(tree, ".override")))


def merge(base: Section, tree: Any, prefix: str, *, literal: bool = False) -> Section:
    """Return `base`, a section at key prefix `prefix`, with `tree` merged over it.

    Values are converted to the types of their keys, and a list is given whole. An empty mapping of
    free keys empties that of `base`. Texts with a reference are kept, unless all are `literal`.
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"{prefix.rstrip('.')}: must be a mapping, is {tree!r}")
    types, changed = annotations(type(base)), dict[str, Any]()
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in types:
            raise ConfigError(f"{key}: unknown key{_hint(str(name), types, prefix)}")
        changed[name] = _merged(getattr(base, name), value, types[name], key, literal)
    return replace(base, **changed)  # pyright: ignore[reportArgumentType]  (a dataclass)


def _merged(base: Any, value: Any, annotation: Any, key: str, literal: bool) -> Any:
    """Return the value of a key, `value` merged over `base`."""
    kind, item = unwrapped(annotation), item_kind(annotation)
    if is_dataclass(kind):
        return merge(base, value, f"{key}.", literal=literal)
    of_sections = is_dataclass(item)
    if not (literal or of_sections) and isinstance(value, str) and "${" in value:
        return value
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{key}: must be a list, which is given whole, is {value!r}")
        return [
            _merged(item() if of_sections else None, part, item, f"{key}[{index}]", literal)
            for index, part in enumerate(value)
        ]
    if get_origin(kind) is not dict:
        return _converted(value, annotation, key)
    if not isinstance(value, dict):
        raise ConfigError(f"{key}: must be a mapping, is {value!r}")
    if odd := [name for name in value if not isinstance(name, str)]:
        raise ConfigError(f"{key}: key {odd[0]!r}: must be text")
    if value and isinstance(base, str):
        raise ConfigError(f"{key}: is that of {base} so far: write it out to change keys of it")
    if value and item is not Any:
        return base | {
            name: _merged(
                base.get(name, item() if of_sections else None),
                *(part, item, f"{key}.{name}", literal),
            )
            for name, part in value.items()
        }
    return _deep(base, value, key) if base and value else deepcopy(value)


def _deep(base: Any, value: dict[str, Any], key: str) -> dict[str, Any]:
    """Merge a mapping of free keys over another one."""
    try:
        found: Any = OmegaConf.to_container(OmegaConf.merge(base, value))
    except OmegaConfBaseException as error:
        raise _explained(error, f"{key}.") from None
    return found


def _converted(value: Any, annotation: Any, key: str) -> Any:
    """Return a value of YAML as one of the type of its key: texts can hold numbers and truths."""
    kind = unwrapped(annotation)
    try:
        if get_origin(kind) is Literal:
            if isinstance(value, str) and value in get_args(kind):
                return value
        elif kind is bool and isinstance(value, str):
            word = value.lower()
            return word in TRUE or (word not in FALSE and bool(int(word)))
        elif kind is bool and isinstance(value, int):
            return bool(value)
        elif kind is str and isinstance(value, str | int | float):
            return str(value)
        elif kind in (int, float) and (type(value) in (int, str) or type(value) is kind):
            return kind(value)
    except (ValueError, OverflowError):  # of a text, or of an integer beyond all floats
        pass
    if get_origin(kind) is Literal:
        raise ConfigError(f"{key}: must be {OneOf(*get_args(kind))}, is {str(value)!r}")
    pattern = mark(annotation, Pattern)
    shown = "" if pattern and pattern.hidden else f", is {value!r}"
    raise ConfigError(f"{key}: must be {pattern or WORDS[kind]}{shown}")


def resolved(config: Config) -> Config:
    """Resolve everything except references to the environment in parameters of environments.

    Raise ConfigError for a reference that leads nowhere, or a secret among the values.
    """
    refuse_written(config)
    note_references(config)
    if "${" not in repr(config):
        return config
    raw = asdict(config)
    sets = (chosen["env"] for chosen in raw["eval"]["sets"].values())
    for env in (raw["env"], *raw["tasks"]["mixture"], *sets):
        env["params"] = kept(env["params"])
    for stage in raw["stages"]:
        stage["override"] = kept(stage["override"])
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.create(raw), resolve=True)
    except OmegaConfBaseException as error:
        raise _explained(error, "") from None
    return merge(Config(), tree, "", literal=True)


def environment(tree: Any) -> dict[str, Any]:
    """Return the `env` section of a tree, empty if it has none."""
    return _mapping(_mapping(tree).get("env"))


def _mapping(value: Any) -> dict[str, Any]:
    """Return `value` if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def _explained(error: OmegaConfBaseException, prefix: str) -> ConfigError:
    key = f"{prefix}{error.full_key or ''}".rstrip(".")
    return ConfigError(f"{key}: {str(error).splitlines()[0]}")


def _hint(name: str, siblings: Iterable[str], prefix: str) -> str:
    """Suggest a sibling, or keys of that name in any section."""
    close = [f"{prefix}{one}" for one in difflib.get_close_matches(name, siblings, n=1)]
    leaves = {key: key.rpartition(".")[2] for key, _ in keys(Config)}
    exact = [key for key, leaf in leaves.items() if leaf == name]
    if exact or not close:
        near = difflib.get_close_matches(name, leaves.values(), n=1)
        close = exact or [key for key, leaf in leaves.items() if leaf in near]
    return f", did you mean {' or '.join(close[:3])}?" if close else ""
