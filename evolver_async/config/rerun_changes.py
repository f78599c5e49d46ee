"""Keys that a rerun of a run may change: those that the learner alone reads, as its data is fixed.

The data of a run was made and chosen by everything else: environments, actors, buffer and seed.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any

from evolver_async.config.load import stage_config
from evolver_async.config.scopes import declared
from evolver_async.config.sections import Config
from evolver_async.config.values.config_error import ConfigError
from evolver_async.config.values.rules import Scope


def refuse_data_changes(before: Config, after: Config) -> None:
    """Raise ConfigError, naming the key, for a change that could have given other data."""
    for key in changed_keys(before, after):
        if Scope.LEARNER not in declared(key.split("."))[1]:
            raise ConfigError(
                f"{key}: cannot change in a rerun, which trains on the data of the run as it is, in"
                " one process; keys with the scope `learner` in docs/configuration.md can change"
            )
    for index in range(len(before.stages)):
        old, new = stage_config(before, index), stage_config(after, index)
        if new.selection.facts.refills and not old.selection.facts.refills:
            raise ConfigError(
                "selection.kind: cannot become dynamic in a rerun: the buffer would have refilled"
                " the steps with other groups; spread and min_p drop equal rewards as well"
            )
        if old.critic.kind != new.critic.kind and old.advantage.facts.critic:
            raise ConfigError(
                f"critic.kind: cannot change in a rerun: the run's critic is {old.critic.kind}"
            )


def changes_stage(before: Config, after: Config, index: int, rollbacks: int) -> bool:
    """Return True if the learner trains stage `index` with other settings."""

    def settings(config: Config) -> Config:
        staged = stage_config(config, index, rollbacks)
        return replace(staged, stages=[])

    return settings(before) != settings(after)


def changes_beginning(before: Config, after: Config, index: int) -> bool:
    """Return True if stage `index` begins with another optimizer or reference."""
    old, new = before.stages[index], after.stages[index]
    begins = attrgetter("reset_optimizer", "refresh_reference")
    return begins(old) != begins(new)


def changed_keys(before: Config, after: Config) -> dict[str, Any]:
    """Return the values of `after` that differ, by key."""
    return dict(changed_values(asdict(before), asdict(after)))


def changed_values(before: Any, after: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of the leaves that differ between two dicts, and their values in `after`."""
    if isinstance(before, dict | None) and isinstance(after, dict | None) and (before or after):
        before, after = before or {}, after or {}
        for name in {**before, **after}:
            yield from changed_values(before.get(name), after.get(name), f"{prefix}{name}.")
    elif isinstance(before, list) and isinstance(after, list) and prefix == "stages.":
        if len(before) != len(after):
            yield "stages", len(after)
            return
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from changed_values(old, new, f"{prefix}{index}.")
    elif before != after:
        yield prefix.removesuffix("."), after
