"""How a configuration comes to be: the dataclasses' defaults ← a recipe file ← `key=value` texts.

Unknown keys, wrong types and impossible combinations are a ConfigError that names the key. The
plain-dict form at the end of this file is what travels inside WELCOME.
"""

import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evolver_async.config import Config, Experience, Policy, Stage
from evolver_async.config.check import ConfigError, check, check_stage
from evolver_async.config.learner import by_kind
from evolver_async.config.secrets import kept, note_references, refuse_written
from evolver_async.config.values import require

# What shapes the whole run or its processes, so that one stage cannot change it: sections, and keys
# of sections of which the rest may differ by stage.
WHOLE_RUN = {
    "run",
    *(f"policy.{item.name}" for item in fields(Policy) if item.name != "max_length"),
    "engine",
    "actors",
    "stages",
    "eval",
    "weights",
    "checkpoint",
    "metrics",
    "launch",
    "security",
    "judge",
    "questioning",
    "reflection",
    "critic.kind",
    "rollout.agent",
    "rollout.agent_reward",
    *(
        f"experience.{item.name}"
        for item in fields(Experience)
        if item.name not in ("strip", "strip_fraction")
    ),
    *(
        f"learner.{name}"
        for name in (
            "betas",
            "eps",
            "weight_decay",
            "device",
            "threads",
            "ranks",
            "deadline_s",
            "max_bad_steps",
            "packing",
            "gradient_checkpointing",
        )
    ),
    *(
        f"buffer.{name}"
        for name in (
            "lease_s",
            "stall_s",
            "warn_s",
            "limit_bytes",
            "disk_limit_bytes",
            "segment_bytes",
            "archive",
            "address",
        )
    ),
}

APPEND = "stages+"  # of an argument: one more stage, behind the others

# What a rollback may change: sections that the learner alone reads, so that nobody has to be told.
ROLLBACK = ("selection", "advantage", "correction", "loss", "learner")


def load(path: Path | str | None, dotlist: Sequence[str] = ()) -> Config:
    """The checked configuration of a run, every stage included.

    `path` is a YAML recipe (None: defaults only); one that names another one as its `base`, by a
    path relative to its own, says only what differs from that. `dotlist` holds `section.key=value`
    texts, with stages addressed as `stages.0.key` and appended by `stages+={kind: …}`. Paths that
    it names are looked for by `check_paths` alone. Whatever names another environment (a recipe
    over its base, a text, a stage's override) drops the parameters of the one before. Raises
    ConfigError.
    """
    resolved = OmegaConf.structured(Config)
    if path is not None:
        for tree in _read(Path(path)):
            resolved = _apply(resolved, tree)
    arguments = [_argument(entry) for entry in dotlist]
    # Names of environments come first, whatever the order: they drop the parameters of others.
    names = [one for one in arguments if one.names_environment(len(resolved.stages))]
    for argument in (*names, *arguments):
        resolved = _apply_argument(resolved, argument)
    config = _to_config(resolved)
    check(config)
    for index, stage in enumerate(config.stages):
        safety = stage_config(config, index).safety
        if stage.kind == "rl" and safety.action == "rollback":
            stage_config(config, index, rollbacks=1)
    return config


def stage_config(config: Config, index: int, rollbacks: int = 0) -> Config:
    """The configuration that holds during stage `index`: its `override` merged in, and checked.

    After `rollbacks` of the stage `safety.rollback` is merged in as well, and the learning rate is
    smaller. What a recipe leaves open to `correction.kind` is that kind's own value here, and here
    alone: a resumed run or a stage with another kind gets that one's.
    """
    override = config.stages[index].override
    where = f"stages[{index}].override"
    for section, keys in override.items():
        named = [f"{section}.{name}" for name in keys] if isinstance(keys, dict) else []
        for name in (section, *named):
            if name in WHOLE_RUN:
                raise ConfigError(f"{where}.{name}: belongs to the whole run, not to one stage")
    try:
        merged = _to_config(_apply(OmegaConf.structured(config), override))
        longest = config.policy.max_length
        require(
            merged.policy.max_length <= longest,
            "policy.max_length",
            f"must be at most the run's ({longest}), which engines hold room for, is"
            f" {merged.policy.max_length}",
        )
        check_stage(merged, index)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}" if override else str(error)) from None
    if rollbacks:
        try:
            merged = _rolled_back(merged, rollbacks)
            check_stage(merged, index)
        except ConfigError as error:
            raise ConfigError(f"safety.rollback: {error}") from None
    correction, loss = by_kind(merged.correction, merged.loss)
    return replace(merged, correction=correction, loss=loss)


def _rolled_back(stage: Config, rollbacks: int) -> Config:
    """The configuration of a stage after so many rollbacks; ConfigError for what cannot change."""
    safety = stage.safety
    for section, keys in safety.rollback.items():
        if section not in ROLLBACK:
            raise ConfigError(f"{section}: must be one of {', '.join(ROLLBACK)}")
        for name in keys if isinstance(keys, dict) else ():
            if f"{section}.{name}" in WHOLE_RUN | {"learner.groups_per_step"}:
                raise ConfigError(f"{section}.{name}: belongs to the whole stage")
    changed = _to_config(_apply(OmegaConf.structured(stage), safety.rollback))
    if "dynamic" in {stage.selection.kind, changed.selection.kind} and (
        stage.selection != changed.selection
    ):
        raise ConfigError("selection: dynamic selection belongs to the whole stage")
    rate = changed.learner.lr * safety.rollback_lr**rollbacks
    return replace(changed, learner=replace(changed.learner, lr=rate))


def dump(config: Config, path: Path) -> None:
    """Writes the whole configuration as YAML that `load` reads back."""
    OmegaConf.save(OmegaConf.structured(config), path)


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML; variables of the environment stay references."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain values; infinities, which the wire refuses, become their name."""
    return _named_infinities(asdict(config))


def from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `to_dict`. Raises ConfigError for anything `to_dict` cannot have written."""
    return _to_config(_apply(OmegaConf.structured(Config), values))


def _read(path: Path, above: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """The trees of a recipe and of those it is based on, the lowest base first."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8 text") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping of sections")
    base = tree.pop("base", None)
    if base is None:
        return [tree]  # pyright: ignore[reportReturnType]  (string keys are checked by _apply)
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base: must be the path of a recipe, is {base!r}")
    below = path.parent / base
    if below.resolve() in (path.resolve(), *above):
        raise ConfigError(f"{path}: base: {base} is based on this very recipe")
    return [*_read(below, (*above, path.resolve())), tree]  # pyright: ignore[reportReturnType]


class Argument(NamedTuple):
    """One `key=value`: the stage that it is about, if any, and what it says of it or of the run."""

    key: str
    stage: str
    tree: Any

    def names_environment(self, stages: int) -> bool:
        """Whether it names the environment of the run, or of one of so many stages."""
        if not self.stage:
            return "name" in _environment(self.tree)
        known = self.stage.isdigit() and int(self.stage) < stages
        return known and "name" in _environment(self.tree.get("override"))


def _argument(entry: str) -> Argument:
    """The value is read as YAML, an empty one is the empty string."""
    key, equals, text = entry.partition("=")
    if not equals or not key:
        raise ConfigError(f"{entry!r}: arguments are written section.key=value")
    try:
        read: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
        tree: Any = read["value"] if text else ""
    except (yaml.YAMLError, OmegaConfBaseException):
        raise ConfigError(f"{key}: cannot read {text!r}") from None
    parts, stage = key.replace("[", ".").replace("]", "").split("."), ""
    if parts[0] == "stages" and len(parts) > 2:
        _, stage, *parts = parts
    for part in reversed(parts):
        tree = {part: tree}
    return Argument(key, stage, tree)


def _apply_argument(resolved: DictConfig, argument: Argument) -> DictConfig:
    if argument.key == APPEND:
        added = _merge(OmegaConf.structured(Stage), argument.tree[APPEND], Stage, f"{APPEND}.")
        resolved.stages.append(added)
        return resolved
    if not argument.stage:
        return _apply(resolved, argument.tree)
    if not argument.stage.isdigit() or int(argument.stage) >= len(resolved.stages):
        raise ConfigError(f"{argument.key}: there is no stage {argument.stage}")
    stage = int(argument.stage)
    raw: Any = OmegaConf.to_container(resolved.stages[stage])
    env = _environment(raw["override"])
    other = _environment(argument.tree.get("override"))
    if other.get("name", (now := env.get("name", _name(resolved)))) != now:
        env.pop("params", None)
    base = OmegaConf.merge(OmegaConf.structured(Stage), raw)
    assert isinstance(base, DictConfig)
    resolved.stages[stage] = _merge(base, argument.tree, Stage, f"stages[{stage}].")
    return resolved


def _environment(tree: Any) -> dict[str, Any]:
    """What a tree of sections says of the environment, itself."""
    env = tree.get("env") if isinstance(tree, dict) else None
    return env if isinstance(env, dict) else {}


def _name(resolved: DictConfig) -> str:
    """The environment's name as it is written: no reference is followed."""
    raw: Any = OmegaConf.to_container(resolved.env)
    return raw["name"]


def _apply(resolved: DictConfig, tree: dict[str, Any]) -> DictConfig:
    """Merges a tree of sections; a list of stages replaces the list, and another environment's
    parameters are not this one's."""
    if _environment(tree).get("name", (now := _name(resolved))) != now:
        resolved.env.params = {}
        for stage in resolved.stages:
            env = stage.override.get("env")
            if isinstance(env, DictConfig) and "name" not in env:
                env.pop("params", None)
    stages = tree.get("stages")
    rest = {name: value for name, value in tree.items() if name != "stages"}
    merged = _merge(resolved, rest, Config, "")
    if stages is not None:
        items = OmegaConf.to_container(stages) if OmegaConf.is_config(stages) else stages
        if not isinstance(items, list):
            raise ConfigError("stages: must be a list")
        merged.stages = [
            _merge(OmegaConf.structured(Stage), item, Stage, f"stages[{index}].")
            for index, item in enumerate(items)
        ]
    return merged


def _merge(base: DictConfig, tree: Any, kind: type, where: str) -> DictConfig:
    """`tree` over `base`, a structured node of dataclass `kind` found at key prefix `where`."""
    _refuse_unknown(tree, kind, where)
    try:
        return OmegaConf.merge(base, tree)  # pyright: ignore[reportReturnType]
    except OmegaConfBaseException as error:
        key = f"{where}{error.full_key or ''}".rstrip(".")
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from None


def _refuse_unknown(tree: Any, kind: type, where: str) -> None:
    if not isinstance(tree, dict | DictConfig):
        raise ConfigError(f"{where.rstrip('.')}: must be a mapping, got {tree!r}")
    types = get_type_hints(kind)
    for name, value in tree.items():
        if name not in types:
            raise ConfigError(f"{where}{name}: unknown key{_hint(str(name), types, where)}")
        if is_dataclass(types[name]):
            _refuse_unknown(value, types[name], f"{where}{name}.")
        item = next(iter(get_args(types[name])), None)
        if isinstance(item, type) and is_dataclass(item) and isinstance(value, list | ListConfig):
            for index, part in enumerate(value):
                _refuse_unknown(part, item, f"{where}{name}[{index}].")


def _hint(name: str, siblings: Iterable[str], where: str) -> str:
    """Guess at what was meant: a sibling, or keys of that name anywhere."""
    close = [f"{where}{one}" for one in difflib.get_close_matches(name, siblings, n=1)]
    leaves = {key: key.rpartition(".")[2] for key in _leaves(Config, "")}
    exact = [key for key, leaf in leaves.items() if leaf == name]
    if exact or not close:
        near = difflib.get_close_matches(name, leaves.values(), n=1)
        close = exact or [key for key, leaf in leaves.items() if leaf in near]
    return f", did you mean {' or '.join(close[:3])}?" if close else ""


def _leaves(kind: type, prefix: str) -> Iterator[str]:
    for name, part in get_type_hints(kind).items():
        if is_dataclass(part):
            assert isinstance(part, type)
            yield from _leaves(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _to_config(resolved: DictConfig) -> Config:
    """Everything resolved but references to the environment among the environments' parameters."""
    raw: Any = OmegaConf.to_container(resolved)
    refuse_written(raw)
    note_references(raw)
    resolved.env.params = kept(raw["env"]["params"])
    for part, plain in zip(resolved.tasks.mixture, raw["tasks"]["mixture"], strict=True):
        part.params = kept(plain["params"])
    for stage, plain in zip(resolved.stages, raw["stages"], strict=True):
        stage.override = kept(plain["override"])
    try:
        config = OmegaConf.to_object(resolved)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    assert isinstance(config, Config)
    return config


def _named_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _named_infinities(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_named_infinities(item) for item in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value
