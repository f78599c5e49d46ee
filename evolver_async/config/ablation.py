"""Configurations in which something is switched off: the effective values, and what to say of them.

A key that nothing reads has no effect, a number that the other keys leave no room for is the
nearest possible one. The run's files keep both as written, so that a change back is one key again.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, replace
from functools import cache
from typing import Any, NamedTuple

from evolver_async.config import merge
from evolver_async.config.inert import (
    guided_members,
    idle_because,
    inert,
    leaves,
    refreshes_nothing,
)
from evolver_async.config.sections import Config
from evolver_async.config.sections.learner import INTERPOLATED
from evolver_async.config.sections.run import EvalSetConfig, StageConfig

PER_TURN = {"grpo_process": "grpo", "gae_bilevel": "gae"}  # and what they are with a single turn
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
    changed, _ = _changed(config, stage)
    defaults = {key: _default(key) for key in inert(changed, stage)}
    return _with(changed, {k: v for k, v in defaults.items() if value_of(changed, k) != v})


def lines(config: Config, given: Collection[str] = ()) -> list[str]:
    """Return what to tell of a configuration: a line of inert keys, a line of changed values.

    Only keys are named that differ from their defaults. `given`: those that nobody wrote.
    """
    stages = [_Stage.of(config, index) for index in range(len(config.stages))]
    reasons: dict[str, list[str]] = {}
    for key, why in _inert_keys(config, stages):
        if key not in given:
            reasons.setdefault(why, []).append(key)
    changes: dict[Change, list[int]] = {}
    for index, one in enumerate(stages):
        for change in one.changes:
            if change.key not in given:
                changes.setdefault(change, []).append(index)
    found = []
    if reasons:
        named = "; ".join(f"{', '.join(keys)} ({why})" for why, keys in reasons.items())
        found.append(f"inert: {named}")
    if changes:
        texts = (f"{change}{_where(at, len(stages))}" for change, at in changes.items())
        found.append(f"changed: {'; '.join(texts)}")
    return found


def _where(indices: list[int], count: int) -> str:
    """Return in which stages a change is made, "" if in all of them."""
    if len(indices) == count:
        return ""
    return f" in {', '.join(f'stages[{index}]' for index in indices)}"


class _Stage(NamedTuple):
    """A stage as written, with what is changed and inert in it; of `rolled`, after a rollback."""

    stage: StageConfig
    config: Config
    changes: list[Change]
    inert: dict[str, str]
    rolled: dict[str, str] | None

    @classmethod
    def of(cls, config: Config, index: int) -> "_Stage":
        stage = config.stages[index]
        written = merge.override(config, stage.override)
        changed, changes = _changed(written, stage)
        rolled = None
        if stage.kind == "rl" and written.safety.action == "rollback":
            after, later = _changed(merge.override(written, written.safety.rollback), stage)
            of_rollback = (one._replace(why=f"{one.why}, after a rollback") for one in later)
            changes += [
                new for new, one in zip(of_rollback, later, strict=True) if one not in changes
            ]
            rolled = inert(after, stage)
        return cls(stage, written, changes, inert(changed, stage), rolled)

    def why(self, key: str) -> str:
        """Return the reason for which the stage does not read a key, "" if it does."""
        if self.rolled is not None and key not in self.rolled:
            return ""
        return self.inert.get(key, "") or self.idle(key)

    def idle(self, key: str) -> str:
        """Return the reason if the kind of the stage is one, "" if it is not."""
        section, _, name = key.partition(".")
        value = value_of(self.config, key)
        return (
            "" if self.stage.kind == "rl" else idle_because(self.stage.kind, section, name, value)
        )


def _inert_keys(config: Config, stages: list[_Stage]) -> Iterator[tuple[str, str]]:
    """Yield the keys that are set and that nothing reads, with the reason: of the run, of stages'
    overrides, of a rollback."""
    for key in {key: None for one in stages for key in one.inert}:
        whys = [one.why(key) for one in stages]
        if all(whys) and value_of(config, key) != _default(key):
            yield key, next(why for one in stages if (why := one.inert.get(key, "")))
    for index, (stage, written, _, _, _) in enumerate(stages):
        for key in leaves():
            if not _names(stage.override, key):
                continue
            value, usual = value_of(written, key), (_default(key), value_of(config, key))
            if (why := stages[index].why(key)) and not all(value == one for one in usual):
                yield f"stages[{index}].override.{key}", why
        if stage.refresh_reference and (why := _refreshes_nothing(written, stage)):
            yield f"stages[{index}].refresh_reference", why
        if stage.until_success and not config.eval.every:
            yield f"stages[{index}].until_success", "eval.every=0"
    rolled = [one.rolled for one in stages if one.rolled is not None]
    for key in leaves() if rolled else ():
        if _names(config.safety.rollback, key) and all(key in one for one in rolled):
            yield f"safety.rollback.{key}", rolled[0][key]


def _refreshes_nothing(written: Config, stage: StageConfig) -> str:
    """Return the reason for which a stage refreshes no reference; a rollback can need one."""
    loss = written.safety.rollback.get("loss", {}) if written.safety.action == "rollback" else {}
    return "" if loss.get("kl_coef") else refreshes_nothing(written, stage)


def _names(tree: dict[str, Any], key: str) -> bool:
    """Return True if a tree of sections has this key."""
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def _changed(config: Config, stage: StageConfig) -> tuple[Config, list[Change]]:
    """Return a configuration with its impossible values replaced, and the changes."""
    made = []
    for rule in CHANGES:
        for key, after, why in rule(config, stage):
            made.append(Change(key, value_of(config, key), after, why))
            config = _with(config, {key: after})
    return config, made


Found = Iterator[tuple[str, Any, str]]  # key, value, reason


def _guidance(config: Config, stage: StageConfig) -> Found:
    share, size = config.rollout.guided_fraction, config.rollout.group_size
    branches = stage.kind in ("world_model", "reflect")
    if config.experience.kind != "none" and share and not branches and not guided_members(config):
        yield "rollout.guided_fraction", 0.0, f"it guides no member of {size}"


def _estimator(config: Config, stage: StageConfig) -> Found:
    """Name what adca is without labels, and an estimator of turns with a single turn; discounted
    bootstraps differ."""
    advantage = config.advantage
    if advantage.kind == "adca" and config.judge.kind == "none":
        yield "advantage.kind", "grpo", "judge.kind=none: without labels adca is the outcome alone"
    differs = advantage.kind == "gae_bilevel" and advantage.bootstrap
    if config.rollout.max_turns == 1 and advantage.kind in PER_TURN and not differs:
        yield "advantage.kind", PER_TURN[advantage.kind], "the same with rollout.max_turns=1"


def _correction(config: Config, stage: StageConfig) -> Found:
    correction = config.correction
    if config.advantage.kind == "vtrace" and correction.kind != "none":
        yield "correction.kind", "none", "advantage.kind=vtrace has its own correction"
    elif correction.anchor == "interpolate" and correction.kind in INTERPOLATED:
        strips = config.experience.kind != "none" and config.experience.internalise == "strip"
        if strips and guided_members(config):
            yield "correction.anchor", "recompute", "guided tokens have no interpolated anchor"


def _members(config: Config, stage: StageConfig) -> Found:
    selection, size = config.selection, config.rollout.group_size
    if selection.kind == "resample_on_correct" and selection.members > size:
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
    if stage.kind == "rl" and selection.kind == "spread":
        kept = max(1, round(kept * selection.keep))
    elif stage.kind == "rl" and selection.kind == "top_k":
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


def _default(key: str) -> Any:
    if key.startswith(SETS):
        return asdict(EvalSetConfig())[key.rpartition(".")[2]]
    return value_of(_defaults(), key)


def _with(config: Config, values: dict[str, Any]) -> Config:
    """Return `config` with these values of keys."""
    for key, value in values.items():
        config = _put(config, key.split("."), value)
    return config


def _put(node: Any, parts: list[str], value: Any) -> Any:
    name, rest = parts[0], parts[1:]
    if isinstance(node, dict):
        return node | {name: _put(node[name], rest, value)}
    return replace(node, **{name: _put(getattr(node, name), rest, value) if rest else value})
