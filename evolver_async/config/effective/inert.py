"""Keys that do nothing, because the mechanism that reads them is off: a rule for each mechanism.

A rule yields a key and the setting for which a stage does not read it. `effective` resets such
keys, `ablation` names them; nothing here refuses anything.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from evolver_async.config.sections import Config
from evolver_async.config.sections.reward import REWARD_MODEL
from evolver_async.config.sections.rollout import EXTERNAL, USERS
from evolver_async.config.sections.run import PREFERENCES, SUPERVISED, StageConfig
from evolver_async.config.values.kinds import KINDS, SELECTIONS
from evolver_async.config.values.rules import keys
from evolver_async.extension import is_own

Inert = Iterator[tuple[str, str]]

EMBEDDING = ("embedder", "dimensions", "embedding.url", "embedding.model", "embedding.key_env")
DISTILLING = ("distill_coef", "distill_on", "distill_teacher", "loss_coef")
INTERNALISING = ("internalise", "strip_fraction", *DISTILLING, "reliance_coef", "keep_copied")
STRIPPING = (
    *("experience.strip_fraction", "experience.reliance_coef"),
    *("loss.boost", "correction.guided"),
)
OF_GUIDED_DATA = (
    *(f"experience.{name}" for name in INTERNALISING),
    *("loss.boost", "correction.guided"),
)
ENTROPY = ("entropy_top_k",)  # the key of `loss` that supervised stages read: entropy is measured
OF_KINDS = {  # keys of `loss` that one kind of stages alone reads
    "dpo": ("dpo_beta", "dpo_nll_coef"),
    "kto": ("kto_beta", "kto_desirable", "kto_undesirable"),
}
LOSSES = {  # keys of `loss` that stages of preferences read
    "reward_model": ("mask_truncated",),
    **{kind: (*ENTROPY, *names, "mask_truncated") for kind, names in OF_KINDS.items()},
}
OF_RL = ("advantage", "correction", "critic")
OF_ADVANTAGES = (*DISTILLING, "reliance_coef")  # keys of `experience` that rl stages alone read
# keys of `selection` that stages of preferences read
REFILLS = ("kind", "by", "max_refills", "max_empty")
OF_ROLLOUTS = {  # keys that act on groups that the policy played
    "rollout": ("temperature", "guided"),
    "tasks": ("synthetic",),
    "buffer": ("sampler", "params", "straggler"),
}


def inert(config: Config, stage: StageConfig) -> dict[str, str]:
    """Return the keys that a stage with this configuration does not read, with the reason."""
    kind, found = stage.kind, dict[str, str]()
    rules = [_experience, _judge, _questioning, _endpoints, _tasks, _processes, _rollout, _safety]
    rules += [_loss, _schedule, _teacher]
    if kind == "rl":
        if not config.data.weight:
            found |= dict(_but(_below("data", "data.weight=0: no group is rows"), "data.weight"))
        elif config.data.path and config.data.weight == 1:
            found |= dict(_of_played())
        found |= dict.fromkeys(("data.validation", "eval.rows"), "an rl stage has evaluations")
        rules += [_of_kinds, _advantage, _correction]
    for rule in rules:
        for key, why in rule(config):
            found.setdefault(key, why)
    if kind != "rl":
        found.setdefault("data.weight", f"all groups of a {kind} stage with data are rows")
    for owner, names in OF_KINDS.items():
        if kind != owner:
            keys_of = (f"loss.{name}" for name in names)
            found |= dict.fromkeys(keys_of, f"no stage of kind {owner}")
    if kind != "reward_model":
        found |= dict(_below("reward_model", "no stage of kind reward_model"))
    if kind in LOSSES:
        found |= dict(_below("teacher", f"a {kind} stage has a loss of its own"))
    return found


def without_effect(config: Config, stage: StageConfig) -> dict[str, str]:
    """Return the keys of `inert`, and those that act on guided data where none is made.

    The latter keep their values: guided data can be left from before a resume.
    """
    found = inert(config, stage)
    if config.experience.kind != "none" and not guided_members(config):
        why = f"rollout.guided_fraction={config.rollout.guided_fraction:g}"
        found = dict.fromkeys(OF_GUIDED_DATA, why) | found
    return found


def guided_members(config: Config) -> int:
    """Return how many members of a group experience guides."""
    return round(config.rollout.guided_fraction * config.rollout.group_size)


def refreshes_nothing(config: Config, stage: StageConfig) -> str:
    """Return the reason for which stage.refresh_reference does nothing, "" if it acts."""
    if stage.kind in ("dpo", "kto"):
        return f"a {stage.kind} stage always starts with the current policy as its reference"
    if stage.kind in (*SUPERVISED, "reward_model"):
        return f"a stage of kind {stage.kind} reads no reference"
    return "" if config.reads_reference else "loss.kl_coef=0"


def named_sets(config: Config) -> list[str]:
    """Return the sets of evaluation episodes whose names can be part of a key."""
    return [name for name in config.eval.sets if name.isidentifier()]


def idle_because(kind: str, section: str, name: str, value: Any) -> str:
    """Return the reason for which a stage of a `kind` other than rl ignores a key, "" if none.

    Preferences are of members of every group: of `selection` such a stage reads that groups without
    spread are refilled, and how many empty steps end the run.
    """
    prefers = kind in PREFERENCES
    if section in OF_RL or (section == "loss" and name not in LOSSES.get(kind, ENTROPY)):
        loss = f"a {kind} stage compares members by a loss of its own"
        return loss if prefers else f"a stage of kind {kind} has no policy loss"
    if section == "experience" and name in OF_ADVANTAGES:
        return "rl stages alone weigh what guidance was worth"
    if section == "safety" and name != "max_reward":
        return "alarms watch rl stages"
    if not prefers and (section == "selection" or name in OF_ROLLOUTS.get(section, ())):
        return f"a stage of kind {kind} trains on scripted episodes, in their order"
    paired = [kind for kind, facts in SELECTIONS.items() if facts.pairs]
    if section == "selection" and (name not in REFILLS or (name == "kind" and value not in paired)):
        return f"a {kind} stage takes members of every group: {', or '.join(paired)}"
    return ""


def _experience(config: Config) -> Inert:
    experience, share = config.experience, config.rollout.guided_fraction
    embeds = experience.kind != "none" or config.questioning.kind == "llm"
    if not embeds:
        yield from _named("experience", EMBEDDING, f"experience.kind={experience.kind}")
    elif experience.embedder != "hash":
        yield "experience.dimensions", f"experience.embedder={experience.embedder}"
    if experience.embedder != "endpoint":
        yield from _below("experience.embedding", f"experience.embedder={experience.embedder}")
    if experience.kind == "none":
        why = "experience.kind=none"
        read = ("experience.kind", *(f"experience.{name}" for name in EMBEDDING if embeds))
        yield from _but(_below("experience", why), *read)
        yield from _named("rollout", ("guided", "guided_fraction"), why)
        yield from ((key, why) for key in ("loss.boost", "correction.guided"))
        yield from ((f"eval.sets.{name}.guided", why) for name in named_sets(config))
        return
    if not is_own(experience.kind):
        yield "experience.params", f"experience.kind={experience.kind}"
    if experience.kind != "llm":
        why = f"experience.kind={experience.kind} asks no model of this section"
        yield from _named("experience", ("rewrite", "vet"), why)
        yield from _below("experience.llm", why)
    if not guided_members(config):
        yield "rollout.guided", f"rollout.guided_fraction={share:g}"
    why = f"experience.internalise={experience.internalise}"
    if experience.internalise != "distill":
        yield from _named("experience", DISTILLING, why)
    if experience.internalise != "strip":
        yield from ((key, why) for key in STRIPPING)
    if experience.internalise == "none":
        yield "experience.keep_copied", why
    correction = config.correction.facts
    if not correction.clips:
        yield "loss.boost", f"correction.kind={config.correction.kind} clips no ratio"
    stale = not correction.reads_anchor and config.correction.guided != "anchor"
    if config.learner.minibatches == 1 and not stale:
        yield "loss.boost", "learner.minibatches=1: no clip takes effect"


def _judge(config: Config) -> Inert:
    judge = config.judge
    if not is_own(judge.kind):
        yield "judge.params", f"judge.kind={judge.kind}"
    if config.rollout.agent_reward == "judged":
        return  # which needs endpoint and limits whatever the kind
    if not judge.audited:
        yield from _but(_below("judge", f"judge.kind={judge.kind}"), "judge.kind")
    if judge.kind == "llm":
        yield "judge.max_tokens", "judge.kind=llm has judge.llm.max_tokens"
    if judge.kind == "self":
        yield from _named("judge.llm", ("url", "model", "key_env"), "judge.kind=self")


def _questioning(config: Config) -> Inert:
    questioning, why = config.questioning, f"questioning.kind={config.questioning.kind}"
    if questioning.kind == "none":
        yield from _but(_below("questioning", why), "questioning.kind")
        yield "tasks.synthetic", why
    if questioning.kind == "goals":
        yield from _named("questioning", ("profile", "obeys_profile", "resolve"), why)
        yield from _below("questioning.llm", why)
    if not questioning.profile:
        yield "questioning.obeys_profile", "questioning.profile is empty"


def _endpoints(config: Config) -> Inert:
    if config.reflection.kind == "template":
        why = "reflection.kind=template"
        yield from _but(_below("reflection", why), "reflection.kind")
    if config.reward.kind != "llm":
        yield from _below("reward.llm", "no term of reward asks a model")
    if all(term.name != REWARD_MODEL for term in config.reward.terms):
        yield from _below("reward.model", f"no term of reward is {REWARD_MODEL}")
    elif not config.reward.model.url:
        yield from _named("reward.model", ("name", "key_env"), "reward.model.url is empty")


def _tasks(config: Config) -> Inert:
    tasks = config.tasks
    if not config.data.path:
        yield from _but(_below("data", "data.path is empty"), "data.path")
    if not tasks.path:
        rows = ("prompt", "answer", "split", "validation", "test", "download", "revision", "subset")
        yield from _named("tasks", rows, "tasks.path is empty")
    makes_tasks = tasks.synthetic and config.questioning.kind != "none"
    if not (tasks.train or tasks.path or makes_tasks):
        yield from _named("tasks", ("solved", "failed"), "no task repeats: tasks.train=0")
    if not is_own(config.buffer.sampler):
        yield "buffer.params", f"buffer.sampler={config.buffer.sampler}"
    bound = ready_bound(config)
    if config.buffer.max_ready >= bound:
        why = f"buffer.max_staleness={config.buffer.max_staleness} bounds ready groups already"
        yield "buffer.max_ready", why
    if not config.data.path:
        yield "eval.rows", "data.path is empty"
    if not config.eval.episodes:
        read = ("eval.episodes", "eval.rows")
        if config.data.path:
            read += ("eval.every", "eval.at_start")
        yield from _but(_below("eval", "eval.episodes=0"), *read)
    if not config.eval.every:
        yield from ((f"eval.sets.{name}.every", "eval.every=0") for name in named_sets(config))


def ready_bound(config: Config) -> float:
    """Return how many steps' worth of groups staleness and reuse let be ready."""
    buffer = config.buffer
    most = buffer.max_staleness + 1 - config.actors.weight_lag
    return max(most, 1) / min(buffer.reuse, max(most, 1))


def _processes(config: Config) -> Inert:
    engine, policy = config.engine, config.policy
    if engine.kind == "torch":
        of_vllm = ("memory", "kv_cache_bytes", "eager", "restarts", "options", "inexact")
        yield from _named("engine", (*of_vllm, "merge_lora"), "engine.kind=torch")
    if not policy.lora.rank:
        why = "policy.lora.rank=0"
        yield from ((key, why) for key in ("engine.merge_lora", "policy.lora.targets"))
        yield "policy.lora.alpha", why
    if config.learner.hosts == 1:
        yield from _named("learner", ("sharding", "address", "trusted_network"), "learner.hosts=1")
    if policy.path:
        preset = ("hidden_size", "layers", "heads", "intermediate_size")
        yield from _named("policy", preset, "policy.path is set")
    else:
        yield from _named("policy", ("download", "revision"), "policy.path is empty")


def _rollout(config: Config) -> Inert:
    rollout, latency, mcp = config.rollout, config.env.latency, config.env.tools.mcp
    if rollout.context != "window":
        yield "rollout.window", f"rollout.context={rollout.context}"
    if not rollout.agent:
        yield from _below("rollout.endpoint", "rollout.agent is empty")
    if rollout.agent != USERS:
        yield from _below("rollout.serve", f"rollout.agent is not {USERS}")
    if rollout.agent not in (EXTERNAL, USERS):
        yield "rollout.reward_wait_s", f"rollout.agent is neither {EXTERNAL} nor {USERS}"
    elif rollout.agent == EXTERNAL and rollout.agent_reward == "judged":
        yield "rollout.reward_wait_s", "rollout.agent_reward=judged"
    if not mcp:
        yield "env.tools.key_env", "env.tools.mcp is empty"
    if latency.kind == "none":
        yield "env.latency.median_s", "env.latency.kind=none"
    if latency.kind != "lognormal":
        yield "env.latency.sigma", f"env.latency.kind={latency.kind}"


def _safety(config: Config) -> Inert:
    if config.safety.action != "rollback":
        why = f"safety.action={config.safety.action}"
        yield from _named("safety", ("rollbacks", "rollback_lr", "rollback"), why)


def _advantage(config: Config) -> Inert:
    advantage = config.advantage
    if not advantage.facts.critic:
        yield from _below("critic", f"advantage.kind={advantage.kind}")
    if not advantage.overlong_limit:
        yield "advantage.overlong_cache", "advantage.overlong_limit=0"


def _correction(config: Config) -> Inert:
    if not config.correction.facts.clips:
        why = f"correction.kind={config.correction.kind} clips no ratio"
        yield from _named("loss", ("clip_low", "clip_high", "dual_clip"), why)


def _loss(config: Config) -> Inert:
    loss = config.loss
    if not loss.kl_coef:
        yield from _named("loss", ("kl", "kl_place"), "loss.kl_coef=0")
    if loss.aggregation != "sequence_sum_norm":
        yield "loss.norm_tokens", f"loss.aggregation={loss.aggregation}"


def _teacher(config: Config) -> Inert:
    teacher = config.teacher
    if not (teacher.path or teacher.url):
        why = "neither teacher.path nor teacher.url is set"
        yield from _but(_below("teacher", why), "teacher.path", "teacher.url")
    elif not teacher.coef:
        yield from _but(_below("teacher", "teacher.coef=0"), "teacher.coef")
    if teacher.divergence != "jsd":
        yield "teacher.beta", f"teacher.divergence={teacher.divergence}"
    if not teacher.url:
        of_url = ("model", "key_env", "timeout_s", "retries", "concurrency", "top_k")
        yield from _named("teacher", of_url, "teacher.url is empty")


def _schedule(config: Config) -> Inert:
    if config.learner.decay == "none":
        yield from _named("learner", ("decay_start", "lr_final"), "learner.decay=none")


def _of_played() -> Inert:
    """Yield the keys that act on groups that the policy played."""
    for section, names in OF_ROLLOUTS.items():
        played = (name for name in names if name != "temperature")
        yield from _named(section, (*played,), "data.weight=1: no episode is played")


def _of_kinds(config: Config) -> Inert:
    """Yield the keys of sections that their kinds do not read; one of one's own can read all."""
    for section, kinds in KINDS.items():
        kind = getattr(config, section).kind
        if not is_own(kind):
            names = {name: None for facts in kinds.values() for name in facts.reads}
            unread = (*(name for name in names if name not in kinds[kind].reads), "params")
            yield from _named(section, unread, f"{section}.kind={kind}")


@cache
def leaves() -> tuple[str, ...]:
    """Return every key of a configuration, with those of the sections within sections."""
    return tuple(key for key, _ in keys(Config))


def _below(section: str, why: str) -> Inert:
    """Yield every key of a section."""
    yield from ((key, why) for key in _keys_below(f"{section}."))


@cache
def _keys_below(prefix: str) -> tuple[str, ...]:
    return tuple(key for key in leaves() if key.startswith(prefix))


def _but(found: Inert, *read: str) -> Inert:
    """Yield what is found, without the keys that are `read`."""
    yield from ((key, why) for key, why in found if key not in read)


def _named(section: str, names: tuple[str, ...], why: str) -> Inert:
    yield from ((f"{section}.{name}", why) for name in names)
