"""Keys that a stage or a rollback may change. All others belong to the whole run or stage."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from evolver_async.config.sections.agentevolver import ExperienceConfig
from evolver_async.config.sections.run import PolicyConfig
from evolver_async.config.values.config_error import ConfigError

# Keys of `experience` that the learner alone reads.
EXPERIENCE = ("internalise", "strip_fraction", "distill_coef", "reliance_coef", "keep_copied")
SECTIONS = (
    *("run", "engine", "actors", "stages", "eval", "weights", "checkpoint", "metrics", "launch"),
    *("security", "judge", "questioning", "reflection", "reward"),
)
KEYS = {  # of sections whose other keys can differ by stage
    "policy": {item.name for item in fields(PolicyConfig)} - {"max_length"},
    "env": {"processes"},  # an actor's, which its stages share
    "rollout": {"agent", "agent_reward", "endpoint", "template"},
    "buffer": {
        *("lease_s", "stall_s", "warn_s", "limit_bytes", "disk_limit_bytes", "segment_bytes"),
        *("archive", "address"),
    },
    "experience": {item.name for item in fields(ExperienceConfig)} - set(EXPERIENCE),
    "critic": {"kind"},
    "learner": {
        *("betas", "eps", "weight_decay", "device", "threads", "ranks", "deadline_s"),
        *("max_bad_steps", "packing", "prefix_trees", "gradient_checkpointing"),
    },
}
# Sections that a rollback can change, because the learner alone reads them.
ROLLBACK = ("selection", "advantage", "correction", "loss", "learner")


def refuse_whole_run(override: dict[str, Any], where: str) -> None:
    """Raise ConfigError for a key of a stage's override that belongs to the whole run."""
    for section, name in _named(override):
        if section in SECTIONS or name in KEYS.get(section, ()):
            key = section if section in SECTIONS else f"{section}.{name}"
            raise ConfigError(f"{where}.{key}: belongs to the whole run, not to one stage")


def refuse_whole_stage(rollback: dict[str, Any]) -> None:
    """Raise ConfigError for a key of `safety.rollback` that cannot change within a stage."""
    for section, name in _named(rollback):
        if section not in ROLLBACK:
            raise ConfigError(f"{section}: must be one of {', '.join(ROLLBACK)}")
        if name in KEYS.get(section, ()) or (section, name) == ("learner", "groups_per_step"):
            raise ConfigError(f"{section}.{name}: belongs to the whole stage")


def _named(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for section, values in tree.items():
        for name in values if isinstance(values, dict) and values else ("",):
            yield section, name
