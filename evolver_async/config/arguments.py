"""Arguments of a command line, `section.key=value`, and their application to a configuration."""

import json
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evolver_async.config.merge import apply, environment, environment_name, merge, staged
from evolver_async.config.scopes import declared
from evolver_async.config.sections import Config
from evolver_async.config.sections.run import StageConfig
from evolver_async.config.values.config_error import ConfigError

QUOTES = ("'", '"')
NULLS = ("null", "Null", "NULL", "~")  # of YAML
APPEND = "stages+"  # key of an argument that adds a stage at the end


class Argument(NamedTuple):
    """One `key=value`: the stage that it changes, if any, and the tree of sections or of stage."""

    key: str
    stage: str
    tree: Any

    def names_environment(self, stages: int) -> bool:
        """Return True if it names the environment of the run, or of one of `stages` stages."""
        if not self.stage:
            return "name" in environment(self.tree)
        known = self.stage.isdigit() and int(self.stage) < stages
        return known and "name" in environment(self.tree.get("override"))


def apply_arguments(resolved: DictConfig, dotlist: Sequence[str]) -> DictConfig:
    """Merge arguments over `resolved`, in order. Raise ConfigError, naming the key."""
    arguments = [_argument(entry) for entry in dotlist]
    # Names of environments come first in any order: they drop the parameters of others.
    names = [one for one in arguments if one.names_environment(len(resolved.stages))]
    for argument in (*names, *arguments):
        resolved = _apply_argument(resolved, argument)
    return resolved


def trees_of(dotlist: Sequence[str]) -> list[Any]:
    """Return the trees of sections of the arguments that set keys for the whole run."""
    return [one.tree for one in map(_argument, dotlist) if not one.stage and one.key != APPEND]


def _argument(entry: str) -> Argument:
    """Read `key=value`, the value as YAML, or as it is for a key whose values are texts."""
    key, equals, text = entry.partition("=")
    if not equals or not key:
        raise ConfigError(f"{entry!r}: arguments are written section.key=value")
    parts, stage = key.replace("[", ".").replace("]", "").split("."), ""
    if parts[0] == "stages" and len(parts) > 2:
        _, stage, *parts = parts
        parts = ["override", *parts] if parts[0] == "data" else parts
    kind, _ = declared(parts, StageConfig if stage else Config)
    tree = _read(key, text, kind is str or get_origin(kind) is Literal)
    for part in reversed(parts):
        tree = {part: tree}
    return Argument(key, stage, tree)


def _read(key: str, text: str, is_text: bool) -> Any:
    """Read a value as YAML. A text is kept as it is, unless it is quoted or null."""
    if not text or (is_text and text[0] not in QUOTES and text.strip() not in NULLS):
        return text
    try:
        read: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError):
        raise ConfigError(f"{key}: cannot read {text!r}") from None
    return read["value"]


def _apply_argument(resolved: DictConfig, argument: Argument) -> DictConfig:
    if argument.key == APPEND:
        tree = staged(argument.tree[APPEND])
        added = merge(OmegaConf.structured(StageConfig), tree, StageConfig, f"{APPEND}.")
        resolved.stages.append(added)
        return resolved
    if not argument.stage:
        return apply(resolved, argument.tree)
    if not argument.stage.isdigit() or int(argument.stage) >= len(resolved.stages):
        raise ConfigError(f"{argument.key}: there is no stage {argument.stage}")
    stage = int(argument.stage)
    raw: Any = OmegaConf.to_container(resolved.stages[stage])
    env = environment(raw["override"])
    now = env.get("name", environment_name(resolved))
    if environment(argument.tree.get("override")).get("name", now) != now:
        env.pop("params", None)
    base = OmegaConf.merge(OmegaConf.structured(StageConfig), raw)
    assert isinstance(base, DictConfig)
    resolved.stages[stage] = merge(base, argument.tree, StageConfig, f"stages[{stage}].")
    return resolved


def text_of(value: Any) -> str:
    """Return a value of YAML as the text of an argument; texts stay as they are."""
    return value if isinstance(value, str) else flow(value)


def flow(value: Any) -> str:
    """Return a value as YAML in one line, which reads back as the same value."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a quoted scalar of YAML too
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False)
    return text.strip().removesuffix("...").strip()
