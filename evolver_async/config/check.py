"""What a configuration must satisfy: every impossible value or combination, named by its key.

Tables say what a single value may be; the functions below say which values exclude each other.
Nothing here touches files except `check_paths`.
"""

import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from evolver_async.config import Config


class ConfigError(ValueError):
    """One sentence that names the key (or file) and what is wrong with it."""


CHOICES: dict[str, tuple[str, ...]] = {
    "policy.dtype": ("float32", "bfloat16"),
    "env.latency.kind": ("none", "fixed", "lognormal"),
    "engine.in_flight": ("keep", "wait"),
    "buffer.sampler": ("fifo", "freshest", "prioritized"),
    "buffer.straggler": ("evict", "wait"),
    "buffer.archive": ("none", "all"),
    "selection.kind": ("all", "spread"),
    "advantage.kind": ("grpo", "rloo", "reinforce"),
    "advantage.std": ("group", "batch", "none"),
    "correction.kind": ("none", "ppo", "decoupled"),
    "correction.anchor": ("recompute", "interpolate"),
    "correction.level": ("token", "trajectory"),
    "loss.aggregation": ("token_mean", "sequence_mean", "sequence_sum_norm"),
    "loss.kl": ("k1", "k2", "k3"),
    "loss.kl_place": ("loss", "reward"),
    "learner.decay": ("none", "linear", "cosine"),
    "metrics.wandb": ("auto", "online", "offline", "disabled"),
    "metrics.panel": ("auto", "panel", "lines", "none"),
    "launch.kind": ("serial", "local"),
}
STAGE_KINDS = ("sft", "rl")

# Numbers are finite and >= 0 unless a table below says otherwise.
SIGNED = {"rollout.format_penalty", "actors.weight_lag_low"}
UNBOUNDED = {"correction.w_max", "loss.dual_clip", "loss.clip_high", "learner.grad_clip"}
AT_LEAST: dict[str, float] = {
    "policy.hidden_size": 1,
    "policy.layers": 1,
    "policy.heads": 1,
    "policy.intermediate_size": 1,
    "policy.max_length": 2,
    "rollout.group_size": 1,
    "rollout.max_turns": 1,
    "rollout.actions_per_turn": 1,
    "rollout.max_tokens": 1,
    "engine.slots": 1,
    "engine.prefill_tokens": 1,
    "engine.threads": 1,
    "actors.count": 1,
    "actors.groups": 1,
    "actors.weight_lag_low": -1,
    "buffer.reuse": 1,
    "buffer.demo_groups": 1,
    "buffer.limit_bytes": 1 << 20,
    "buffer.disk_limit_bytes": 1 << 20,
    "buffer.segment_bytes": 1 << 16,
    "buffer.max_attempts": 1,
    "selection.max_empty": 1,
    "loss.norm_tokens": 1,
    "loss.dual_clip": 1,
    "learner.groups_per_step": 1,
    "learner.minibatches": 1,
    "learner.token_budget": 1,
    "learner.logprob_chunk": 1,
    "learner.max_bad_steps": 1,
    "learner.threads": 1,
    "eval.episodes": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 2,
    "metrics.samples_every": 1,
}
AT_MOST: dict[str, float] = {"rollout.max_turns": 32767}  # turns are numbered in 16 bits
POSITIVE = (
    "env.step_timeout_s",
    "env.episode_timeout_s",
    "rollout.temperature",  # training needs the log-probs of what was sampled
    "actors.poll_s",
    "actors.weights_timeout_s",
    "buffer.lease_s",
    "buffer.stall_s",
    "correction.w_max",
    "loss.clip_low",
    "loss.clip_high",
    "learner.grad_clip",
    "eval.timeout_s",
    "selection.keep",
)
FRACTIONS = (
    "selection.keep",
    "advantage.baseline_decay",
    "correction.max_masked",
    "loss.clip_low",
    "learner.decay_start",
    "learner.lr_final",
)


def check(config: Config) -> None:
    """Raises ConfigError for the first value or combination that cannot work.

    Stages with overrides are checked as `load.stage_config` merges them.
    """
    _check_values(dict(_leaves(config, "")))
    _check_stages(config)
    for index, stage in enumerate(config.stages):
        if not stage.override:
            check_stage(config, index)


def check_stage(config: Config, index: int) -> None:
    """Raises ConfigError for a combination that cannot work in stage `index`, of which this is."""
    _check_values(dict(_leaves(config, "")))
    _check_policy(config)
    _check_buffer(config)
    _check_limits(config, index)
    _check_learner(config)
    if config.stages[index].kind == "rl":
        _check_group_size(config)


def check_paths(config: Config) -> None:
    """Raises ConfigError when a path that the configuration names is not there, or not writable."""
    if config.policy.path:
        directory = Path(config.policy.path)
        if not directory.is_dir():
            raise ConfigError(f"policy.path: {directory} is not a directory")
        for name in ("config.json", "tokenizer.json"):
            if not (directory / name).is_file():
                raise ConfigError(f"policy.path: {directory} has no {name}")
    if not Path(config.weights.dir).is_dir():
        raise ConfigError(f"weights.dir: {config.weights.dir} is not a directory")
    try:
        tempfile.TemporaryDirectory(dir=config.weights.dir).cleanup()
    except OSError as error:
        raise ConfigError(
            f"weights.dir: {config.weights.dir} cannot be written to: {error.strerror}"
        ) from None


def _leaves(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value


def _check_values(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(name, value)
    for name, allowed in CHOICES.items():
        _choice(name, values[name], allowed)
    for name, least in AT_LEAST.items():
        _require(values[name] >= least, name, f"must be at least {least:g}, is {values[name]}")
    for name, most in AT_MOST.items():
        _require(values[name] <= most, name, f"must be at most {most:g}, is {values[name]}")
    for name in POSITIVE:
        _require(values[name] > 0, name, f"must be greater than 0, is {values[name]}")
    for name in FRACTIONS:
        _require(values[name] <= 1, name, f"must be at most 1, is {values[name]}")
    for name in ("engine.device", "learner.device"):
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", values[name])
        _require(known is not None, name, f"must be auto, cpu or cuda, is {values[name]!r}")
    _check_params("env.params", values["env.params"])


def _check_number(name: str, value: float) -> None:
    _require(not math.isnan(value), name, "is not a number")
    _require(math.isfinite(value) or name in UNBOUNDED, name, f"must be finite, is {value}")
    _require(value >= 0 or name in SIGNED, name, f"must not be negative, is {value}")


def _check_params(name: str, value: Any) -> None:
    """The environment's own parameters travel over the wire, which carries finite plain values."""
    if isinstance(value, dict):
        for part, item in value.items():
            _check_params(f"{name}.{part}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_params(f"{name}[{index}]", item)
    elif isinstance(value, float):
        _require(math.isfinite(value), name, f"must be finite, is {value}")


def _check_stages(config: Config) -> None:
    _require(bool(config.stages), "stages", "needs at least one stage")
    for index, stage in enumerate(config.stages):
        where = f"stages[{index}]"
        _choice(f"{where}.kind", stage.kind, STAGE_KINDS)
        for name in ("steps", "tokens", "hours", "until_success", "expert_fraction"):
            _check_number(f"{where}.{name}", getattr(stage, name))
        for name in ("until_success", "expert_fraction"):
            value = getattr(stage, name)
            _require(value <= 1, f"{where}.{name}", f"must be at most 1, is {value}")
        limits = (stage.steps, stage.tokens, stage.hours, stage.until_success)
        _require(any(limits), where, "has no limit: give it steps, tokens, hours or until_success")


def _check_limits(config: Config, index: int) -> None:
    """What the limits of a stage, and its kind, ask from the other sections."""
    stage, where = config.stages[index], f"stages[{index}]"
    groups = config.learner.groups_per_step
    _require(
        not stage.until_success or config.eval.every > 0,
        f"{where}.until_success",
        "needs evaluations: eval.every is 0",
    )
    _require(
        stage.kind != "sft" or any((stage.steps, stage.tokens, stage.hours)),
        f"{where}.until_success",
        "an sft stage is evaluated only after its end: give it steps, tokens or hours",
    )
    _require(
        not stage.refresh_reference or config.loss.kl_coef > 0,
        f"{where}.refresh_reference",
        "there is no reference: loss.kl_coef is 0",
    )
    _require(
        config.learner.decay == "none" or stage.steps > 0,
        f"{where}.steps",
        f"learner.decay={config.learner.decay} runs over the stage's steps, so it needs some",
    )
    _require(
        stage.kind != "sft" or config.buffer.demo_groups >= groups,
        "buffer.demo_groups",
        f"must be at least learner.groups_per_step ({groups}), or {where} waits for ever",
    )


def _check_policy(config: Config) -> None:
    policy, rollout = config.policy, config.rollout
    if not policy.path:
        _require(
            policy.hidden_size % (2 * policy.heads) == 0,
            "policy.hidden_size",
            f"must be a multiple of 2 × policy.heads ({2 * policy.heads}), is {policy.hidden_size}",
        )
    _require(
        rollout.max_tokens < policy.max_length,
        "rollout.max_tokens",
        f"must be less than policy.max_length ({policy.max_length}), is {rollout.max_tokens}",
    )
    _require(
        config.learner.token_budget >= policy.max_length,
        "learner.token_budget",
        f"must hold one sequence of policy.max_length ({policy.max_length}) tokens",
    )
    name = config.run.name
    _require(
        name not in (".", "..") and not set(name) & set("/\\\0"),
        "run.name",
        f"must be a plain directory name, is {name!r}",
    )


def _check_buffer(config: Config) -> None:
    buffer, actors = config.buffer, config.actors
    bound, lag = buffer.max_staleness, actors.weight_lag
    _require(
        lag <= bound,
        "actors.weight_lag",
        f"must be at most buffer.max_staleness ({bound}), is {lag}",
    )
    _require(
        actors.weight_lag_low <= lag,
        "actors.weight_lag_low",
        f"must be at most actors.weight_lag ({lag}), is {actors.weight_lag_low}",
    )
    _require(
        buffer.reuse <= bound + 1 - lag,
        "buffer.reuse",
        f"must be at most buffer.max_staleness + 1 - actors.weight_lag ({bound + 1 - lag}), "
        f"is {buffer.reuse}",
    )
    _require(
        buffer.segment_bytes <= buffer.disk_limit_bytes,
        "buffer.segment_bytes",
        f"must fit into buffer.disk_limit_bytes ({buffer.disk_limit_bytes})",
    )
    _check_address("buffer.address", buffer.address)


def _check_address(name: str, address: str) -> None:
    """Sockets stay on this host: the wire is not encrypted."""
    if not address or address.startswith("ipc://"):
        return
    match = re.fullmatch(r"tcp://\[?([^\]/]+)\]?:(\d{1,5})", address)
    _require(match is not None, name, f"must be ipc://path or tcp://host:port, is {address!r}")
    assert match is not None
    host = match[1]
    loopback = host == "localhost" or (_is_ip(host) and ip_address(host).is_loopback)
    _require(loopback, name, f"{host} is not a loopback address")
    _require(0 < int(match[2]) < 1 << 16, name, f"{match[2]} is not a port (1 to 65535)")


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _check_learner(config: Config) -> None:
    learner, loss, correction = config.learner, config.loss, config.correction
    kept = learner.groups_per_step
    if config.selection.kind == "spread":
        kept = math.floor(kept * config.selection.keep)
    _require(
        learner.minibatches <= kept,
        "learner.minibatches",
        f"must be at most the groups that one step trains ({kept}), is {learner.minibatches}",
    )
    _require(
        correction.anchor != "interpolate" or correction.kind == "decoupled",
        "correction.anchor",
        f"interpolate needs correction.kind=decoupled, not {correction.kind}",
    )
    _require(
        loss.kl != "k1" or loss.kl_place == "reward",
        "loss.kl",
        "k1 has no gradient in the loss on average: use loss.kl_place=reward, or k2 or k3",
    )
    _require(loss.clip_low < 1, "loss.clip_low", f"must be less than 1, is {loss.clip_low}")
    _require(
        len(learner.betas) == 2 and all(0 <= beta < 1 for beta in learner.betas),
        "learner.betas",
        f"must be two numbers in [0, 1), is {learner.betas}",
    )
    _require(
        learner.decay_start < 1,
        "learner.decay_start",
        f"must be less than 1, is {learner.decay_start}",
    )


def _check_group_size(config: Config) -> None:
    """Relative advantages and selection by spread need somebody to compare with."""
    for name, value, compares in (
        ("advantage.kind", config.advantage.kind, ("grpo", "rloo")),
        ("selection.kind", config.selection.kind, ("spread",)),
    ):
        _require(
            config.rollout.group_size > 1 or value not in compares,
            "rollout.group_size",
            f"{name}={value} compares the members of a group, so it needs at least 2",
        )


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    listed = ", ".join(allowed)
    _require(value in allowed, name, f"must be one of {listed}, is {value!r}")


def _require(holds: bool, name: str, problem: str) -> None:
    if not holds:
        raise ConfigError(f"{name}: {problem}")
