"""Loading of a configuration: defaults of the dataclasses, those for the model at hand, then recipe
files, then arguments.

Unknown keys, wrong types and impossible combinations are a ConfigError that names the key. The
plain-dict form is the one inside WELCOME.
"""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evolver_async.config.arguments import Argument, apply_arguments, read_arguments, trees_of
from evolver_async.config.checks import check, check_stage
from evolver_async.config.merge import apply, merge, override, resolved
from evolver_async.config.model_defaults import Default, model_defaults
from evolver_async.config.scopes import named, refuse_whole_run, refuse_whole_stage
from evolver_async.config.secrets import escaped, note_references
from evolver_async.config.sections import Config
from evolver_async.config.sections.learner import by_kind
from evolver_async.config.sections.run import BRANCHED, PAIRED
from evolver_async.config.values.config_error import ConfigError
from evolver_async.file_formats import foreign_run
from evolver_async.files import write_whole

END = "..."  # of a document in YAML: the last line of a file that `dump` has written


def load(path: Path | str | None, dotlist: Sequence[str] = ()) -> Config:
    """Return the checked configuration of a run, every stage included. Raise ConfigError.

    `path` is a YAML recipe (None: defaults only). A recipe that names another one as its `base`, by
    a path relative to its own, says only what differs from it. `dotlist` holds `section.key=value`
    texts: `stages.0.key` addresses a stage, `stages+={kind: …}` appends one. Paths among the values
    are checked by `check_paths` alone. A recipe, text or override that names another environment
    drops the parameters of the one before.
    """
    return load_explained(path, dotlist)[0]


def load_explained(
    path: Path | str | None, dotlist: Sequence[str] = ()
) -> tuple[Config, dict[str, str]]:
    """Return what `load` does, and the reason of each key that follows from the model at hand."""
    trees = [] if path is None else _read(Path(path))
    arguments = read_arguments(dotlist)
    config = _merged({}, trees, arguments)
    layer = {}
    if config.policy.path:
        given = {key for tree in (*trees, *trees_of(arguments)) for key in named(tree)}
        layer = model_defaults(config, given)
        config = _merged(_nested(layer), trees, arguments)
    check_run(config)
    return config, {key: default.why for key, default in layer.items()}


def _merged(
    layer: dict[str, Any], trees: list[dict[str, Any]], arguments: Sequence[Argument]
) -> Config:
    """Merge the layer of the model, recipes and arguments over the defaults, in this order."""
    config = Config()
    for tree in (layer, *trees):
        config = apply(config, tree)
    return resolved(apply_arguments(config, arguments))


def _nested(layer: dict[str, Default]) -> dict[str, Any]:
    """Return the tree of sections of a layer."""
    tree: dict[str, Any] = {}
    for key, default in layer.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = default.value
    return tree


def load_written(run_dir: Path, changes: Sequence[str] = (), *, checked: bool = True) -> Config:
    """Return the configuration of a run, with `changes` as `load` takes them.

    Raise ConfigError if the directory has another format or the file is not whole, and, unless it
    is not to be `checked`, for what `load` refuses. The error names the file if the value is in it.
    """
    if problem := foreign_run(run_dir):
        raise ConfigError(problem)
    path = run_dir / "config.yaml"
    config = Config()
    for tree in _read(path, end=END):
        try:
            config = apply(config, tree)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    config = resolved(apply_arguments(config, read_arguments(changes)))
    problem = _problem(config) if checked else ""
    if problem and (not changes or problem == _problem(load_written(run_dir, checked=False))):
        problem = f"{path}: {problem}; a change KEY=VALUE at --resume replaces a value of the file"
    if problem:
        raise ConfigError(problem)
    return config


def _problem(config: Config) -> str:
    """Return what cannot work in a configuration, "" if it can."""
    try:
        check_run(config)
    except ConfigError as error:
        return str(error)
    return ""


def check_run(config: Config) -> None:
    """Raise ConfigError for what cannot work in a configuration, every stage included."""
    check(config)
    for index, stage in enumerate(config.stages):
        staged = stage_config(config, index)
        if stage.kind == "rl" and staged.safety.action == "rollback":
            stage_config(config, index, rollbacks=1)


def stage_as_written(config: Config, index: int) -> Config:
    """Return the configuration of stage `index`, unchecked and with its bounds left open.

    A group of a stage that learns from rows is one row.
    """
    stage = config.stages[index]
    written = override(config, stage.override)
    if not written.data.path or stage.kind in ("rl", *BRANCHED):
        return written
    size = 2 if stage.kind in PAIRED else 1
    return replace(written, rollout=replace(written.rollout, group_size=size))


def stage_config(config: Config, index: int, rollbacks: int = 0) -> Config:
    """Return the checked configuration of stage `index`, with its `override` merged in.

    After `rollbacks` of the stage `safety.rollback` is merged in as well, and the learning rate is
    smaller. Bounds that a recipe leaves open to `correction.kind` are closed here and here alone: a
    resumed run or a stage with another kind gets the bounds of that kind. Keys that do nothing in
    the stage have their defaults, so that they cannot act. Sections that do not change are those of
    `config` itself; the others are made once for all configurations of the same values.
    """
    said = repr(config)
    asked = _Asked(said, index, rollbacks, config)
    # variables of the environment, to which an override can refer, can change
    changed = _changed.__wrapped__(asked) if "${" in said else _changed(asked)
    return replace(config, **deepcopy(changed))


@dataclass(frozen=True)
class _Asked:
    """A stage of a configuration, which is compared by its text."""

    text: str
    index: int
    rollbacks: int
    config: Config = field(compare=False)


@lru_cache(maxsize=64)
def _changed(asked: _Asked) -> dict[str, Any]:
    """Return the sections of a stage that are not those of the run."""
    staged = vars(_staged(asked.config, asked.index, asked.rollbacks))
    before = vars(asked.config)
    return deepcopy({name: one for name, one in staged.items() if one is not before[name]})


def _staged(config: Config, index: int, rollbacks: int) -> Config:
    tree, where = config.stages[index].override, f"stages[{index}].override"
    refuse_whole_run(tree, where)
    try:
        merged = stage_as_written(config, index)
        longest = config.policy.max_length
        if merged.policy.max_length > longest:
            raise ConfigError(
                f"policy.max_length: must be at most the run's ({longest}), for which engines have"
                f" memory, is {merged.policy.max_length}"
            )
        found = check_stage(merged, index)
    except ConfigError as error:
        of_run = not tree or _refused_without(config, index) == str(error)
        raise ConfigError(str(error) if of_run else f"{where}: {error}") from None
    if rollbacks:
        try:
            found = check_stage(_rolled_back(merged, rollbacks), index)
        except ConfigError as error:
            raise ConfigError(f"safety.rollback: {error}") from None
    # between engine and learner bfloat16 alone rounds a fresh sequence out of the narrow bounds
    fresh = found.buffer.max_staleness == 0 and found.policy.decided_dtype == "float32"
    correction, loss = by_kind(found.correction, found.loss, fresh=fresh)
    return replace(found, correction=correction, loss=loss)


def _refused_without(config: Config, index: int) -> str:
    """Return the error of stage `index` without its override, "" if it has none."""
    stages = list(config.stages)
    stages[index] = replace(stages[index], override={})
    try:
        check_stage(replace(config, stages=stages), index)
    except ConfigError as error:
        return str(error)
    return ""


def concurrent_members(config: Config) -> list[int]:
    """Return by stage how many members an actor plays at a time while that stage is in training.

    A stage with smaller groups than the run's plays more of them: its evaluations are as wide. One
    group of any stage fits, otherwise that stage could not begin.
    """
    sizes = [stage_config(config, i).rollout.group_size for i in range(len(config.stages))]
    least = config.rollout.group_size
    return [max(config.actors.groups * max(size, least), *sizes) for size in sizes]


def _rolled_back(stage: Config, rollbacks: int) -> Config:
    """Return the configuration of a stage after `rollbacks`, with a smaller learning rate."""
    safety = stage.safety
    refuse_whole_stage(safety.rollback)
    changed = override(stage, safety.rollback)
    refills = stage.selection.facts.refills or changed.selection.facts.refills
    if refills and stage.selection != changed.selection:
        raise ConfigError("selection: dynamic selection belongs to the whole stage")
    rate = changed.learner.lr * safety.rollback_lr**rollbacks
    return replace(changed, learner=replace(changed.learner, lr=rate))


def dump(config: Config, path: Path) -> None:
    """Write the whole configuration as YAML that `load` reads back. The file is never torn.

    A copy of it can be: its last line tells whether it is whole.
    """
    write_whole(path, f"{to_yaml(config)}{END}\n")


def to_yaml(config: Config, reasons: Mapping[str, str] | None = None) -> str:
    """Return the whole configuration as YAML. References to the environment stay references.

    `reasons`: texts by key `section.name`, for a comment behind its value.
    """
    text = OmegaConf.to_yaml(OmegaConf.create(escaped(asdict(config))))
    section, lines = "", []
    for line in text.splitlines() if reasons else ():
        section = line.partition(":")[0] if line[:1].strip() else section
        why = reasons and reasons.get(f"{section}.{line.strip().partition(':')[0]}")
        lines.append(f"{line}  # model: {why}" if why and line.startswith("  ") else line)
    return "\n".join([*lines, ""]) if reasons else text


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values, with infinities as text for the wire."""
    return _infinities_as_text(asdict(config))


def from_dict(values: dict[str, Any]) -> Config:
    """Invert `to_dict`. Raise ConfigError for values that `to_dict` cannot have written."""
    config = merge(Config(), values, "", literal=True)
    note_references(config)
    return config


def _read(path: Path, above: tuple[Path, ...] = (), end: str = "") -> list[dict[str, Any]]:
    """Return the trees of a recipe and of its bases, the lowest first. `end`: its last line."""
    try:
        text = path.read_text(encoding="utf-8")
        if end and text.split()[-1:] != [end]:
            raise ConfigError(
                f"{path}: its last line is not {end}: it was cut off (copy it again), or written"
                " before the formats of files had numbers"
            )
        tree = _tree(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8 text") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: is nested too deep") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping of sections")
    base, tree = tree.get("base"), {name: one for name, one in tree.items() if name != "base"}
    if base is None:
        return [tree]
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base: must be the path of a recipe, is {base!r}")
    below = path.parent / base
    if below.resolve() in (path.resolve(), *above):
        raise ConfigError(f"{path}: base: {base} is based on this very recipe")
    return [*_read(below, (*above, path.resolve())), tree]


@lru_cache(maxsize=32)
def _tree(text: str) -> Any:
    """Return the content of a YAML text, which nobody changes: a resume reads its file thrice."""
    return OmegaConf.to_container(OmegaConf.load(StringIO(text)))


def _infinities_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _infinities_as_text(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_infinities_as_text(item) for item in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value
