"""The configuration by which a stage runs: values without room are changed, inert keys reset."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from typing import Any, NamedTuple

from evolver_async.config.effective.inert import guided_members, inert
from evolver_async.config.sections import Config
from evolver_async.config.sections.run import EvalSetConfig, StageConfig

SETS = "eval.sets."


class Change(NamedTuple):
    """A value that the other keys of a stage make impossible, and the one that takes its place."""

    key: str
    before: Any
    after: Any
    why: str

    def __str__(self) -> str:
        before, after = (f"{x:g}" if isinstance(x, float) else x for x in self[1:3])
        return f"{self.key} {before} → {after} ({self.why})"


def effective(config: Config, stage: StageConfig) -> Config:
    """Return the configuration by which `stage` runs: `config` with changes, inert keys reset.

    Sections that do not change are those of `config` itself.
    """
    changed, _ = possible(config, stage)
    defaults = {key: default_of(key) for key in inert(changed, stage)}
    return with_values(changed, {k: v for k, v in defaults.items() if value_of(changed, k) != v})


def possible(config: Config, stage: StageConfig) -> tuple[Config, list[Change]]:
    """Return a configuration with its impossible values replaced, and the changes."""
    made = []
    for rule in CHANGES:
        for key, after, why in rule(config, stage):
            made.append(Change(key, value_of(config, key), after, why))
            config = with_values(config, {key: after})
    return config, made


Found = Iterator[tuple[str, Any, str]]  # key, value, reason


def _guidance(config: Config, stage: StageConfig) -> Found:
    share, size = config.rollout.guided_fraction, config.rollout.group_size
    branches = stage.kind in ("world_model", "reflect")
    if config.experience.kind != "none" and share and not branches and not guided_members(config):
        yield "rollout.guided_fraction", 0.0, f"it guides no member of {size}"


def _estimator(config: Config, stage: StageConfig) -> Found:
    """Name what an estimator of labels is without them, and one of turns with a single turn;
    discounted bootstraps differ."""
    advantage, facts = config.advantage, config.advantage.facts
    if facts.unlabelled and config.judge.kind == "none":
        yield "advantage.kind", facts.unlabelled, "judge.kind=none: without labels it is the same"
    differs = facts.critic and advantage.bootstrap
    if config.rollout.max_turns == 1 and facts.one_turn and not differs:
        yield "advantage.kind", facts.one_turn, "the same with rollout.max_turns=1"


def _correction(config: Config, stage: StageConfig) -> Found:
    correction, advantage = config.correction, config.advantage
    if advantage.facts.corrects and correction.kind != "none":
        yield "correction.kind", "none", f"advantage.kind={advantage.kind} has its own correction"
    elif correction.anchor == "interpolate" and "anchor" in correction.facts.reads:
        strips = config.experience.kind != "none" and config.experience.internalise == "strip"
        if strips and guided_members(config):
            yield "correction.anchor", "recompute", "guided tokens have no interpolated anchor"


def _members(config: Config, stage: StageConfig) -> Found:
    selection, size = config.selection, config.rollout.group_size
    if "members" in selection.facts.reads and selection.members > size:
        yield "selection.members", size, "rollout.group_size"


def _overlong(config: Config, stage: StageConfig) -> Found:
    cache, limit = config.advantage.overlong_cache, config.advantage.overlong_limit
    if limit and not cache:
        yield "advantage.overlong_cache", 1, "the reward falls over a token at least"
    if 0 < limit < cache:
        yield "advantage.overlong_cache", limit, "advantage.overlong_limit"


def _reuse(config: Config, stage: StageConfig) -> Found:
    bound = config.buffer.max_staleness
    most = max(1, bound + 1 - config.actors.weight_lag)
    if config.buffer.reuse > most:
        why = f"buffer.max_staleness={bound}"
        why += f", actors.weight_lag={config.actors.weight_lag}" if config.actors.weight_lag else ""
        yield "buffer.reuse", most, why


def _minibatches(config: Config, stage: StageConfig) -> Found:
    selection, kept = config.selection, config.learner.groups_per_step
    read = selection.facts.reads if stage.kind == "rl" else ()
    if "keep" in read:
        kept = max(1, round(kept * selection.keep))
    if "k" in read:
        kept = min(kept, selection.k)
    if config.learner.minibatches > kept:
        yield "learner.minibatches", kept, f"groups that a step trains: {kept}"


def _of_rl(rule: Callable[[Config, StageConfig], Found]) -> Callable[[Config, StageConfig], Found]:
    """Restrict a rule to stages whose kind reads what it changes."""
    return lambda config, stage: rule(config, stage) if stage.kind == "rl" else iter(())


CHANGES = (
    *(_guidance, _reuse, _minibatches),
    *map(_of_rl, (_estimator, _correction, _members, _overlong)),
)


def value_of(config: Config, key: str) -> Any:
    """Return the value of a key such as `eval.sets.larger.every`."""
    node: Any = config
    for part in key.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    return node


@cache
def _defaults() -> Config:
    return Config()


def default_of(key: str) -> Any:
    """Return the default of a key."""
    if key.startswith(SETS):
        return asdict(EvalSetConfig())[key.rpartition(".")[2]]
    return value_of(_defaults(), key)


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """Return `config` with these values of keys."""
    for key, value in values.items():
        config = _put(config, key.split("."), value)
    return config


def _put(node: Any, parts: list[str], value: Any) -> Any:
    name, rest = parts[0], parts[1:]
    if isinstance(node, dict):
        return node | {name: _put(node[name], rest, value)}
    return replace(node, **{name: _put(getattr(node, name), rest, value) if rest else value})
