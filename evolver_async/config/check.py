"""What a configuration must satisfy: every impossible value or combination, named by its key.

`values.py` says what a single value may be; the functions below say which exclude each other.
Nothing here touches files except `check_paths`.
"""

import re
import tempfile
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from evolver_async.config import Config, Llm
from evolver_async.config.agent import check_agent
from evolver_async.config.channels import check_channel
from evolver_async.config.engine import check_engine
from evolver_async.config.gpus import check_gpus
from evolver_async.config.groups import check_groups
from evolver_async.config.learner import INTERPOLATED
from evolver_async.config.stages import check_limits, check_stages, check_tasks
from evolver_async.config.values import (
    LLM_SECTIONS,
    ConfigError,
    check_values,
    require,
)

__all__ = ["ConfigError", "check", "check_name", "check_paths", "check_stage"]


def check(config: Config) -> None:
    """Raises ConfigError for the first value or combination that cannot work.

    Stages with overrides are checked as `load.stage_config` merges them.
    """
    check_values(config)
    check_gpus(config)
    check_channel(config)
    check_stages(config)
    for index, stage in enumerate(config.stages):
        if not stage.override:
            check_stage(config, index)


def check_stage(config: Config, index: int) -> None:
    """Raises ConfigError for a combination that cannot work in stage `index`, of which this is."""
    check_values(config)
    _check_policy(config)
    check_engine(config)
    check_tasks(config)
    _check_buffer(config)
    check_limits(config, index)
    _check_learner(config)
    check_agent(config)
    _check_mechanisms(config)
    if config.stages[index].kind == "rl":
        check_groups(config)
        _check_guided(config)


def check_paths(config: Config) -> None:
    """Raises ConfigError when a path that the configuration names is not there, or not writable."""
    if config.policy.path:
        directory = Path(config.policy.path)
        if not directory.is_dir():
            raise ConfigError(f"policy.path: {directory} is not a directory")
        for name in ("config.json", "tokenizer.json"):
            if not (directory / name).is_file():
                raise ConfigError(f"policy.path: {directory} has no {name}")
    embedder = config.experience.embedder
    if config.experience.kind != "none" and embedder != "hash" and not Path(embedder).is_dir():
        raise ConfigError(f"experience.embedder: {embedder} is neither hash nor a directory")
    if not Path(config.weights.dir).is_dir():
        raise ConfigError(f"weights.dir: {config.weights.dir} is not a directory")
    try:
        tempfile.TemporaryDirectory(dir=config.weights.dir).cleanup()
    except OSError as error:
        raise ConfigError(
            f"weights.dir: {config.weights.dir} cannot be written to: {error.strerror}"
        ) from None


def check_name(key: str, name: str) -> None:
    """Raises ConfigError if a run cannot have this name."""
    require(
        name not in ("", ".", "..") and not set(name) & set("/\\\0"),
        key,
        f"must be a plain directory name, is {name!r}",
    )


def _check_policy(config: Config) -> None:
    policy, rollout = config.policy, config.rollout
    if not policy.path:
        require(
            policy.hidden_size % (2 * policy.heads) == 0,
            "policy.hidden_size",
            f"must be a multiple of 2 × policy.heads ({2 * policy.heads}), is {policy.hidden_size}",
        )
    require(
        rollout.max_tokens < policy.max_length,
        "rollout.max_tokens",
        f"must be less than policy.max_length ({policy.max_length}), is {rollout.max_tokens}",
    )
    require(
        config.learner.token_budget == 0 or config.learner.token_budget >= policy.max_length,
        "learner.token_budget",
        f"must hold one sequence of policy.max_length ({policy.max_length}) tokens",
    )
    require(
        config.learner.token_budget > 0 or config.learner.device != "cpu",
        "learner.token_budget",
        "0 measures a GPU's memory, and learner.device is cpu",
    )
    if config.run.name:
        check_name("run.name", config.run.name)
    hardware = config.run.hardware
    require(
        re.fullmatch(r"([1-9]\d*x[1-9]\d*GB)?", hardware) is not None,
        "run.hardware",
        f"must be GPUs x memory of each, as 8x80GB, is {hardware!r}",
    )


def _check_buffer(config: Config) -> None:
    buffer, actors = config.buffer, config.actors
    bound, lag = buffer.max_staleness, actors.weight_lag
    require(
        lag <= bound,
        "actors.weight_lag",
        f"must be at most buffer.max_staleness ({bound}), is {lag}",
    )
    require(
        actors.weight_lag_low <= lag,
        "actors.weight_lag_low",
        f"must be at most actors.weight_lag ({lag}), is {actors.weight_lag_low}",
    )
    require(
        buffer.reuse <= bound + 1 - lag,
        "buffer.reuse",
        f"must be at most buffer.max_staleness + 1 - actors.weight_lag ({bound + 1 - lag}), "
        f"is {buffer.reuse}",
    )
    require(
        config.env.step_timeout_s < buffer.stall_s,
        "env.step_timeout_s",
        f"must be less than buffer.stall_s ({buffer.stall_s:g}): no ticket goes before it is late",
    )
    require(
        config.env.step_timeout_s < config.eval.timeout_s,
        "eval.timeout_s",
        f"must be more than env.step_timeout_s ({config.env.step_timeout_s:g}): an evaluation makes"
        " no progress within a step",
    )
    require(
        buffer.segment_bytes <= buffer.disk_limit_bytes,
        "buffer.segment_bytes",
        f"must fit into buffer.disk_limit_bytes ({buffer.disk_limit_bytes})",
    )
    _check_address("buffer.address", buffer.address, keyed=bool(config.security.keys))


def _check_address(name: str, address: str, keyed: bool) -> None:
    """Without keys sockets stay on this host: the wire is not encrypted then."""
    if not address or address.startswith("ipc://"):
        return
    match = re.fullmatch(r"tcp://\[?([^\]/]+)\]?:(\d{1,5})", address)
    require(match is not None, name, f"must be ipc://path or tcp://host:port, is {address!r}")
    assert match is not None
    host = match[1]
    loopback = host == "localhost" or (_is_ip(host) and ip_address(host).is_loopback)
    require(
        keyed or loopback,
        name,
        f"{host} is not a loopback address, so it needs security.keys (`evolver-async keys DIR`)",
    )
    require(0 < int(match[2]) < 1 << 16, name, f"{match[2]} is not a port (1 to 65535)")


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
        kept = max(1, round(kept * config.selection.keep))
    elif config.selection.kind == "top_k":
        kept = min(kept, config.selection.k)
    require(
        learner.minibatches <= kept,
        "learner.minibatches",
        f"must be at most the groups that one step trains ({kept}), is {learner.minibatches}",
    )
    require(
        correction.level != "trajectory" or correction.kind in ("decoupled", "topr"),
        "correction.level",
        f"correction.kind={correction.kind} has no choice of it: leave it at auto",
    )
    require(
        config.advantage.kind != "vtrace" or correction.kind == "none",
        "correction.kind",
        "advantage.kind=vtrace corrects by itself: set it to none",
    )
    require(
        loss.kl != "k1" or loss.kl_place == "reward",
        "loss.kl",
        "k1 has no gradient in the loss on average: use loss.kl_place=reward, or k2 or k3",
    )
    require(loss.clip_low < 1, "loss.clip_low", f"must be less than 1, is {loss.clip_low}")
    require(
        len(learner.betas) == 2 and all(0 <= beta < 1 for beta in learner.betas),
        "learner.betas",
        f"must be two numbers in [0, 1), is {learner.betas}",
    )
    require(
        learner.decay_start < 1,
        "learner.decay_start",
        f"must be less than 1, is {learner.decay_start}",
    )
    require(
        not config.safety.rollback or config.safety.action == "rollback",
        "safety.rollback",
        f"safety.action={config.safety.action} never goes back: set it to rollback",
    )
    if learner.ranks > 1:
        _check_ranks(config)


def _check_ranks(config: Config) -> None:
    """What several ranks cannot do."""
    require(
        config.launch.kind != "serial",
        "learner.ranks",
        "launch.kind=serial is one process: leave it at 1",
    )
    require(
        ":" not in config.learner.device,
        "learner.device",
        f"{config.learner.device} is one GPU: with learner.ranks > 1 use cuda, and "
        "launch.gpus.learner to say which",
    )


def _check_llm(key: str, llm: Llm) -> None:
    """An address without a login, and the name of a variable: both are written down."""
    require(
        re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", llm.url) is not None,
        f"{key}.url",
        "must be http:// or https://, a host, and a path without login or query",
    )
    require(_has_port(llm.url), f"{key}.url", "its port is none (1 to 65535)")
    require(
        re.fullmatch(r"([A-Za-z_]\w*)?", llm.key_env) is not None,
        f"{key}.key_env",
        "must be the name of an environment variable",
    )


def _has_port(url: str) -> bool:
    """Whether a port that a URL names can be one."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def _check_mechanisms(config: Config) -> None:
    """Experience, judge and questioning: what each needs, and who needs them."""
    for name in LLM_SECTIONS:
        section = getattr(config, name)
        judged = name == "judge" and config.rollout.agent_reward == "judged"
        if section.kind == "llm" or judged:
            for key in ("url", "model"):
                value = getattr(section.llm, key)
                require(bool(value), f"{name}.llm.{key}", f"{name}.kind=llm needs one")
            require(
                config.launch.kind != "serial",
                f"{name}.kind",
                "llm needs real time, which launch.kind=serial has not",
            )
            _check_llm(f"{name}.llm", section.llm)
    require(
        config.judge.kind in ("none", "rule") or config.judge.timeout_s < config.buffer.stall_s,
        "judge.timeout_s",
        f"must be below buffer.stall_s ({config.buffer.stall_s:g}): else groups that are being"
        " judged are given to others",
    )
    require(
        config.reflection.kind != "llm" or config.reflection.timeout_s < config.buffer.stall_s,
        "reflection.timeout_s",
        f"must be below buffer.stall_s ({config.buffer.stall_s:g}): else groups that are being"
        " reflected on are given to others",
    )
    require(
        config.advantage.kind != "adca" or config.judge.kind != "none",
        "advantage.kind",
        "adca needs labels: judge.kind is none",
    )
    require(
        not config.tasks.synthetic or config.questioning.kind != "none",
        "tasks.synthetic",
        "nobody makes tasks: questioning.kind is none",
    )
    require(
        config.questioning.replays_kept <= config.questioning.replays,
        "questioning.replays_kept",
        f"must be at most questioning.replays ({config.questioning.replays})",
    )
    address = config.experience.address
    _check_address("experience.address", address, keyed=bool(config.security.keys))
    require(
        bool(address)
        or config.experience.kind == "none"
        or not config.buffer.address.startswith("tcp://"),
        "experience.address",
        "needs one where buffer.address has one of tcp",
    )


def _check_guided(config: Config) -> None:
    """What cannot be done with data whose prompts lose their experience in training."""
    experience, guided = config.experience, config.rollout.guided_fraction
    if experience.kind == "none" or not guided or experience.strip == "never":
        return
    correction, updates = config.correction, config.learner.minibatches
    require(
        correction.anchor != "interpolate" or correction.kind not in INTERPOLATED,
        "correction.anchor",
        "interpolate is undefined for guided tokens: use recompute",
    )
    require(
        not config.loss.boost or correction.kind not in ("cispo", "topr"),
        "loss.boost",
        f"correction.kind={correction.kind} clips nothing that could be boosted: set it to 0",
    )
    require(
        not config.loss.boost
        or updates > 1
        or (correction.kind == "ppo" and correction.guided != "anchor"),
        "loss.boost",
        "with one update a step (learner.minibatches) no clip can bind: set it to 0",
    )
