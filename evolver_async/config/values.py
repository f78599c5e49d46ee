"""What a single configuration value may be: tables by key, and the error that names the key."""

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from evolver_async.config import Config
from evolver_async.config.learner import by_kind
from evolver_async.errors import Unrecoverable

# The text that shows what came from the environment: a reference, by each form of its value.
references: dict[str, str] = {}


class ConfigError(Unrecoverable, ValueError):
    """One sentence that names the key (or file) and what is wrong with it.

    Where it would hold a value that a configuration took from the environment, it holds the
    reference instead.
    """

    def __str__(self) -> str:
        if not references:
            return super().__str__()
        forms = sorted(references, key=len, reverse=True)
        # a short value only where it stands alone
        whole = (re.escape(f) if len(f) >= 8 else rf"(?<!\w){re.escape(f)}(?!\w)" for f in forms)
        return re.sub("|".join(whole), lambda found: references[found[0]], super().__str__())


CHOICES: dict[str, tuple[str, ...]] = {
    "policy.dtype": ("float32", "bfloat16"),
    "env.prompt": ("auto", "tiny", "plain"),
    "env.latency.kind": ("none", "fixed", "lognormal"),
    "rollout.agent_reward": ("returned", "judged"),
    "rollout.context": ("full", "window", "single"),
    "engine.kind": ("torch", "vllm"),
    "engine.in_flight": ("keep", "wait"),
    "buffer.sampler": ("fifo", "freshest", "prioritized"),
    "buffer.straggler": ("evict", "wait"),
    "buffer.archive": ("none", "all", "<bytes>"),
    "selection.kind": (
        "all",
        "spread",
        "top_p",
        "top_k",
        "min_p",
        "resample_on_correct",
        "dynamic",
    ),
    "selection.draw": ("lowest", "inverse"),
    "selection.scale": ("none", "linear", "sqrt"),
    "advantage.kind": (
        "grpo",
        "grpo_process",
        "adca",
        "rloo",
        "reinforce",
        "gae",
        "gae_bilevel",
        "vtrace",
    ),
    "critic.kind": ("shared", "separate"),
    "advantage.length": ("none", "sqrt"),
    "advantage.std": ("group", "batch", "none"),
    "correction.kind": (
        "none",
        "ppo",
        "decoupled",
        "icepop",
        "geo_mask",
        "cispo",
        "gspo",
        "topr",
    ),
    "correction.anchor": ("recompute", "interpolate"),
    "correction.level": ("auto", "token", "trajectory"),
    "correction.guided": ("stale", "anchor", "behaviour"),
    "experience.kind": ("none", "contrast", "llm"),
    "experience.strip": ("always", "never", "fraction"),
    "judge.kind": ("none", "rule", "self", "llm"),
    "questioning.kind": ("none", "goals", "llm"),
    "reflection.kind": ("template", "llm"),
    "loss.aggregation": ("token_mean", "sequence_mean", "sequence_sum_norm"),
    "loss.kl": ("k1", "k2", "k3"),
    "loss.kl_place": ("loss", "reward"),
    "learner.decay": ("none", "linear", "cosine"),
    "safety.action": ("warn", "checkpoint", "pause", "rollback"),
    "weights.kind": ("auto", "shm", "collective", "cuda_ipc"),
    "metrics.wandb": ("auto", "online", "offline", "disabled"),
    "metrics.panel": ("auto", "panel", "lines", "none"),
    "launch.kind": ("serial", "local"),
}

LLM_SECTIONS = ("experience", "judge", "questioning", "reflection")
LLM_COUNTS = ("concurrency", "max_tokens", "max_bytes", "breaker_failures")

# Numbers are finite and >= 0 unless a table below says otherwise.
SIGNED = {
    "rollout.format_penalty",
    "rollout.truncated_reward",
    "actors.weight_lag_low",
    "advantage.alpha_final",
}
UNBOUNDED = {
    "advantage.rho_max",
    "advantage.c_max",
    "critic.clip",
    "correction.w_max",
    "correction.high",
    "correction.epsilon",
    "loss.dual_clip",
    "loss.clip_high",
    "loss.boost",
    "learner.grad_clip",
    "safety.entropy_rise",
    "safety.grad_z",
}
AT_LEAST: dict[str, float] = {
    "policy.hidden_size": 1,
    "policy.layers": 1,
    "policy.heads": 1,
    "policy.intermediate_size": 1,
    "policy.max_length": 2,
    "rollout.group_size": 1,
    "rollout.max_turns": 1,
    "rollout.actions_per_turn": 1,
    "rollout.window": 1,
    "rollout.max_tokens": 1,
    "engine.slots": 1,
    "engine.prefill_tokens": 1,
    "engine.threads": 1,
    "engine.tensor_parallel": 1,
    "actors.count": 1,
    "actors.groups": 1,
    "actors.weight_lag_low": -1,
    "buffer.reuse": 1,
    "buffer.demo_groups": 1,
    "buffer.limit_bytes": 1 << 20,
    "buffer.disk_limit_bytes": 1 << 20,
    "buffer.segment_bytes": 1 << 16,
    "buffer.max_attempts": 1,
    "experience.dimensions": 8,
    "experience.top_k": 1,
    "experience.capacity": 1,
    "experience.per_source": 1,
    "experience.max_chars": 1,
    "judge.max_chars": 1,
    "judge.max_tokens": 1,
    "questioning.every": 1,
    "questioning.groups": 1,
    "questioning.max_tasks": 1,
    "questioning.per_episode": 1,
    "questioning.max_turns": 1,
    "questioning.depth": 1,
    "questioning.replays": 1,
    **{f"{section}.llm.{name}": 1 for section in LLM_SECTIONS for name in LLM_COUNTS},
    "advantage.alpha_final": -1,
    "selection.max_empty": 1,
    "selection.k": 1,
    "selection.max_refills": 1,
    "correction.high": 1,
    "loss.norm_tokens": 1,
    "loss.dual_clip": 1,
    "learner.groups_per_step": 1,
    "learner.minibatches": 1,
    "learner.logprob_chunk": 1,
    "learner.max_bad_steps": 1,
    "learner.threads": 1,
    "learner.ranks": 1,
    "eval.episodes": 1,
    "weights.bucket_bytes": 1 << 12,
    "checkpoint.every": 1,
    "checkpoint.keep": 2,
    "safety.warmup": 2,  # a spread of values needs two
    "safety.patience": 1,
    "safety.format_warmup": 1,
    "safety.format_patience": 1,
    "safety.rollbacks": 1,
    "safety.entropy_rise": 1,
    "metrics.samples_every": 1,
}
MOST_TURNS = 32767  # turns are numbered in 16 bits
AT_MOST: dict[str, float] = {
    "rollout.max_turns": MOST_TURNS,
    "questioning.max_turns": MOST_TURNS,
}
POSITIVE = (
    "policy.lora.alpha",
    "learner.deadline_s",
    "env.step_timeout_s",
    "env.episode_timeout_s",
    "rollout.temperature",  # training needs the log-probs of what was sampled
    "engine.memory",
    "actors.poll_s",
    "actors.weights_timeout_s",
    "buffer.lease_s",
    "buffer.stall_s",
    "buffer.warn_s",
    "correction.w_max",
    "loss.clip_low",
    "loss.clip_high",
    "learner.grad_clip",
    "eval.timeout_s",
    "weights.deadline_s",
    "launch.healthy_s",
    "selection.keep",
    "selection.p",
    "advantage.rho_max",
    "advantage.c_max",
    "critic.lr",
    "critic.clip",
    "critic.coef",
    "loss.dpo_beta",
    "safety.max_reward",
    "safety.rollback_lr",
    "experience.timeout_s",
    "judge.timeout_s",
    "questioning.temperature",
    "reflection.timeout_s",
    *(f"{section}.llm.timeout_s" for section in LLM_SECTIONS),
)
FRACTIONS = (
    "selection.keep",
    "selection.p",
    "tasks.synthetic",
    "rollout.guided_fraction",
    "engine.memory",
    "experience.strip_fraction",
    "experience.similarity",
    "experience.dedup",
    "experience.least_score",
    "experience.retire_utility",
    "questioning.jaccard",
    "questioning.similarity",
    "tasks.solved",
    "tasks.failed",
    "advantage.baseline_decay",
    "advantage.gamma",
    "advantage.lam",
    "advantage.gamma_turn",
    "correction.max_masked",
    "correction.low",
    "loss.clip_low",
    "learner.decay_start",
    "learner.lr_final",
    "safety.solved",
    "safety.spread_share",
    "safety.zero_groups",
    "safety.entropy_share",
    "safety.dependence_share",
    "safety.rollback_lr",
    "safety.format_rise",
)


def check_values(config: Config) -> None:
    """Raises ConfigError for the first value that is out of range by itself.

    What is left open to `correction.kind` is in range: that kind's own is checked in its place.
    """
    correction, loss = by_kind(config.correction, config.loss)
    _check_values(dict(_leaves(replace(config, correction=correction, loss=loss), "")))


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
            check_number(name, value)
    for name, allowed in CHOICES.items():
        choice(name, values[name], allowed)
    for name, least in AT_LEAST.items():
        require(values[name] >= least, name, f"must be at least {least:g}, is {values[name]}")
    for name, most in AT_MOST.items():
        require(values[name] <= most, name, f"must be at most {most:g}, is {values[name]}")
    for name in POSITIVE:
        require(values[name] > 0, name, f"must be greater than 0, is {values[name]}")
    for name in FRACTIONS:
        require(values[name] <= 1, name, f"must be at most 1, is {values[name]}")
    for name in ("engine.device", "learner.device"):
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", values[name])
        require(known is not None, name, f"must be auto, cpu or cuda, is {values[name]!r}")
    check_params("env.params", values["env.params"])


def check_number(name: str, value: float) -> None:
    """Raises ConfigError for a number that no key may have, but for the tables' exceptions."""
    require(not math.isnan(value), name, "is not a number")
    require(math.isfinite(value) or name in UNBOUNDED, name, f"must be finite, is {value}")
    require(value >= 0 or name in SIGNED, name, f"must not be negative, is {value}")


def check_params(name: str, value: Any) -> None:
    """The environment's own parameters travel over the wire, which carries finite plain values."""
    if isinstance(value, dict):
        for part, item in value.items():
            check_params(f"{name}.{part}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_params(f"{name}[{index}]", item)
    elif isinstance(value, float):
        require(math.isfinite(value), name, f"must be finite, is {value}")


def choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError for a value that is not allowed; `<bytes>` allows any whole number."""
    fits = value in allowed or ("<bytes>" in allowed and value.isdecimal())
    require(fits, name, f"must be one of {', '.join(allowed)}, is {value!r}")


def require(holds: bool, name: str, problem: str) -> None:
    """Raises ConfigError about the key `name` unless `holds`."""
    if not holds:
        raise ConfigError(f"{name}: {problem}")
