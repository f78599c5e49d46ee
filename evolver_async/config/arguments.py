"""Arguments of a command line, `section.key=value`, and their application to a configuration."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evolver_async.config.merge import apply, environment, merge, staged, without_parameters
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


def read_arguments(dotlist: Iterable[str]) -> list[Argument]:
    """Read texts `key=value`. Raise ConfigError for what is none."""
    return [_argument(entry) for entry in dotlist]


def apply_arguments(config: Config, arguments: Sequence[Argument]) -> Config:
    """Merge arguments over `config`, in order. Raise ConfigError, naming the key."""
    # Names of environments come first in any order: they drop the parameters of others.
    names = [one for one in arguments if one.names_environment(len(config.stages))]
    for argument in (*names, *arguments):
        config = _apply_argument(config, argument)
    return config


def trees_of(arguments: Iterable[Argument]) -> list[Any]:
    """Return the trees of sections of the arguments that set keys for the whole run."""
    return [one.tree for one in arguments if not one.stage and one.key != APPEND]


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


def _apply_argument(config: Config, argument: Argument) -> Config:
    if argument.key == APPEND:
        added = merge(StageConfig(), staged(argument.tree[APPEND]), f"{APPEND}.")
        return replace(config, stages=[*config.stages, added])
    if not argument.stage:
        return apply(config, argument.tree)
    if not argument.stage.isdigit() or int(argument.stage) >= len(config.stages):
        raise ConfigError(f"{argument.key}: there is no stage {argument.stage}")
    index = int(argument.stage)
    stage = config.stages[index]
    now = environment(stage.override).get("name", config.env.name)
    if environment(argument.tree.get("override")).get("name", now) != now:
        stage = replace(stage, override=without_parameters(stage.override))
    changed = merge(stage, argument.tree, f"stages[{index}].")
    return replace(config, stages=[*config.stages[:index], changed, *config.stages[index + 1 :]])


def text_of(value: Any) -> str:
    """Return a value of YAML as the text of an argument; texts stay as they are."""
    return value if isinstance(value, str) else flow(value)


def flow(value: Any) -> str:
    """Return a value as YAML in one line, which reads back as the same value."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a quoted scalar of YAML too
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False)
    return text.strip().removesuffix("...").strip()
