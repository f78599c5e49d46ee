"""Configurations in which something is switched off: what to say of them.

A key that nothing reads has no effect, a number that the other keys leave no room for is the
nearest possible one. The run's files keep both as written, so that a change back is one key again.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from evolver_async.config.effective.changes import Change, default_of, possible, value_of
from evolver_async.config.effective.inert import (
    idle_because,
    leaves,
    refreshes_nothing,
    without_effect,
)
from evolver_async.config.merge import override
from evolver_async.config.sections import Config
from evolver_async.config.sections.run import StageConfig


def lines(config: Config, given: Collection[str] = (), before: Config | None = None) -> list[str]:
    """Return what to tell of a configuration: a line of inert keys, a line of changed values.

    Only keys are named that differ from their defaults. `given`: those that nobody wrote; `before`:
    a configuration of which the same was told.
    """
    keys, changes = _findings(config, given)
    if before is not None:
        told, known = _findings(before, given)
        keys = [one for one in keys if one not in told]
        changes = [one for one in changes if one not in known]
    found = []
    if keys:
        reasons: dict[str, list[str]] = {}
        for key, why in keys:
            reasons.setdefault(why, []).append(key)
        named = "; ".join(f"{', '.join(some)} ({why})" for why, some in reasons.items())
        found.append(f"inert: {named}")
    if changes:
        found.append(f"changed: {'; '.join(changes)}")
    return found


def _findings(config: Config, given: Collection[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the inert keys with their reasons, and the changed values as text."""
    stages = [_Stage.of(config, index) for index in range(len(config.stages))]
    keys = [one for one in _inert_keys(config, stages) if one[0] not in given]
    changes: dict[Change, list[int]] = {}
    for index, one in enumerate(stages):
        for change in one.changes:
            if change.key not in given:
                changes.setdefault(change, []).append(index)
    return keys, [f"{change}{_where(at, len(stages))}" for change, at in changes.items()]


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
        written = override(config, stage.override)
        changed, changes = possible(written, stage)
        rolled = None
        if stage.kind == "rl" and written.safety.action == "rollback":
            after, later = possible(override(written, written.safety.rollback), stage)
            of_rollback = (one._replace(why=f"{one.why}, after a rollback") for one in later)
            changes += [
                new for new, one in zip(of_rollback, later, strict=True) if one not in changes
            ]
            rolled = without_effect(after, stage)
        return cls(stage, written, changes, without_effect(changed, stage), rolled)

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
        if all(whys) and value_of(config, key) != default_of(key):
            yield key, next(why for one in stages if (why := one.inert.get(key, "")))
    for index, (stage, written, _, _, _) in enumerate(stages):
        for key in leaves():
            if not _names(stage.override, key):
                continue
            value, usual = value_of(written, key), (default_of(key), value_of(config, key))
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
