"""Keys that a rerun of a run may change: those that the learner alone reads, as its data is fixed.

The data of a run was made and chosen by everything else: environments, actors, buffer and seed.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from evolver_async.config.load import stage_config
from evolver_async.config.overrides import EXPERIENCE
from evolver_async.config.sections import Config
from evolver_async.config.values.config_error import ConfigError

SECTIONS = ("selection", "advantage", "critic", "correction", "loss", "learner")
KEYS = tuple(f"experience.{name}" for name in EXPERIENCE)
STAGE_KEYS = ("reset_optimizer", "refresh_reference")
REFUSED = {
    "learner.groups_per_step": "it decided which groups the run took together",
    "learner.ranks": "a rerun is one process",
    "learner.deadline_s": "a rerun is one process",
    "selection.max_refills": "the buffer applied it to the run's data",
}


def refuse_data_changes(before: Config, after: Config) -> None:
    """Raise ConfigError, naming the key, for a change that could have given other data."""
    for key in _changed(asdict(before), asdict(after)):
        name = _without_stage(key)
        if reason := REFUSED.get(name):
            raise ConfigError(f"{key}: cannot change in a rerun: {reason}")
        section = name.partition(".")[0]
        if section not in SECTIONS and name not in (*KEYS, *STAGE_KEYS):
            raise ConfigError(
                f"{key}: cannot change in a rerun, which trains on the data of the run as it is;"
                f" keys that can change: {', '.join(f'{one}.*' for one in SECTIONS)},"
                f" {', '.join(KEYS)}"
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
    return any(getattr(old, name) != getattr(new, name) for name in STAGE_KEYS)


def changed_keys(before: Config, after: Config) -> dict[str, Any]:
    """Return the values of `after` that differ, by key."""
    return dict(changed_values(asdict(before), asdict(after)))


def _changed(before: Any, after: Any) -> Iterator[str]:
    for key, _ in changed_values(before, after):
        yield key


def changed_values(before: Any, after: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of the leaves that differ between two dicts, and their values in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            yield from changed_values(before.get(name), after.get(name), f"{prefix}{name}.")
    elif isinstance(before, list) and isinstance(after, list) and prefix == "stages.":
        if len(before) != len(after):
            yield "stages", len(after)
            return
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from changed_values(old, new, f"{prefix}{index}.")
    elif isinstance(after, dict) and before is None:
        yield from changed_values({}, after, prefix)
    elif before != after:
        yield prefix.removesuffix("."), after


def _without_stage(key: str) -> str:
    """Return the part of a key behind `stages.<n>.override.` or `stages.<n>.`."""
    parts = key.split(".")
    if parts[0] == "stages" and len(parts) > 2:
        parts = parts[3:] if parts[2] == "override" else parts[2:]
    return ".".join(parts)
