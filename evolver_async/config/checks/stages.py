"""Checks of stages and tasks against the other sections."""

import shlex
from collections.abc import Iterator
from typing import Any

from evolver_async.config.sections import Config
from evolver_async.config.sections.run import FINAL_SET, SUPERVISED, StageConfig
from evolver_async.config.values.rules import check_plain

ENTROPY = ("entropy_top_k",)  # the key of `loss` that supervised stages read: entropy is measured
PREFERENCES = (*ENTROPY, "dpo_beta", "dpo_nll_coef")  # those that a dpo stage reads
OF_RL = ("advantage", "correction", "critic")
OF_ADVANTAGES = ("distill_coef", "reliance_coef")  # keys of `experience` that rl stages alone read
REFILLS = (
    "kind",
    "by",
    "max_refills",
    "max_empty",
)  # the keys of `selection` that a dpo stage reads
PAIRED = ("all", "dynamic")  # and its kinds
OF_ROLLOUTS = {  # keys that act on groups that the policy played
    "rollout": ("temperature", "guided"),
    "tasks": ("synthetic",),
    "buffer": ("sampler", "params", "straggler"),
}


def stages(config: Config) -> Iterator[tuple[str, str]]:
    """Require at least one stage, and a limit of every stage."""
    if not config.stages:
        yield "stages", "needs at least one stage"
    for index, stage in enumerate(config.stages):
        if not (stage.steps or stage.tokens or stage.hours or stage.until_success):
            yield f"stages[{index}]", "has no limit: set steps, tokens, hours or until_success"
    if config.loss.dpo_nll_coef and all(stage.kind != "dpo" for stage in config.stages):
        yield "loss.dpo_nll_coef", "must be 0: no stage is of kind dpo"


def limits(config: Config, index: int) -> Iterator[tuple[str, str]]:
    """Require what the limits and the kind of a stage need from other sections."""
    stage, where = config.stages[index], f"stages[{index}]"
    if stage.until_success and not config.eval.every:
        yield f"{where}.until_success", "needs evaluations: eval.every is 0"
    if stage.kind != "rl" and not (stage.steps or stage.tokens or stage.hours):
        yield (
            f"{where}.until_success",
            f"a stage of kind {stage.kind} is evaluated only after its end: set steps, tokens or"
            " hours",
        )
    if stage.kind == "dpo" and config.rollout.group_size == 1:
        yield "rollout.group_size", f"must be at least 2: {where} compares members of a group"
    yield from _without_effect(stage)
    if stage.refresh_reference and stage.kind == "dpo":
        problem = "the reference of a dpo stage always is the policy that it begins with"
        yield f"{where}.refresh_reference", problem
    if stage.refresh_reference and stage.kind in SUPERVISED:
        yield f"{where}.refresh_reference", f"a stage of kind {stage.kind} reads no reference"
    if stage.refresh_reference and not config.loss.kl_coef:
        yield f"{where}.refresh_reference", "there is no reference: loss.kl_coef is 0"
    if (decay := config.learner.decay) != "none" and not stage.steps:
        yield f"{where}.steps", f"must be set: learner.decay={decay} runs over the stage's steps"
    decays = config.advantage.kind == "adca" and config.advantage.alpha_final >= 0
    if stage.kind == "rl" and decays and not stage.steps:
        yield f"{where}.steps", "must be set: advantage.alpha_final is reached at the last step"
    groups = config.learner.groups_per_step
    if stage.kind in SUPERVISED and config.buffer.demo_groups < groups:
        least = f"must be at least learner.groups_per_step ({groups})"
        yield "buffer.demo_groups", f"{least}, or {where} never fills a step"


def _without_effect(stage: StageConfig) -> Iterator[tuple[str, str]]:
    """Refuse keys of an override that a stage of this kind does not read."""
    if stage.kind == "rl":
        return
    for section, values in stage.override.items():
        for name, value in values.items():
            if why := idle_because(stage.kind, section, name, value):
                yield f"{section}.{name}", f"has no effect: {why}"


def idle_because(kind: str, section: str, name: str, value: Any) -> str:
    """Return the reason for which a stage of a `kind` other than rl ignores a key, "" if none.

    A dpo stage pairs members of every group: of `selection` it reads that groups without spread
    are refilled, and how many empty steps end the run.
    """
    dpo = kind == "dpo"
    if section in OF_RL or (section == "loss" and name not in (PREFERENCES if dpo else ENTROPY)):
        loss = "a dpo stage compares pairs by a loss of its own"
        return loss if dpo else f"a stage of kind {kind} has no policy loss"
    if section == "experience" and name in OF_ADVANTAGES:
        return "rl stages alone weigh what guidance was worth"
    if section == "safety" and name != "max_reward":
        return "alarms watch rl stages"
    if not dpo and (section == "selection" or name in OF_ROLLOUTS.get(section, ())):
        return f"a stage of kind {kind} trains on scripted episodes, in their order"
    if section == "selection" and (name not in REFILLS or (name == "kind" and value not in PAIRED)):
        return "a dpo stage makes a pair of every group: all, or dynamic"
    return ""


def tasks(config: Config) -> Iterator[tuple[str, str]]:
    """Refuse keys of `tasks` that exclude each other or have no effect."""
    tasks = config.tasks
    check_plain("env.params", config.env.params)
    for name in ("prompt", "split", "validation", "test"):
        if getattr(tasks, name) and not tasks.path:
            yield f"tasks.{name}", "needs rows: set tasks.path"
    if tasks.answer and not tasks.prompt:
        yield "tasks.answer", "needs tasks.prompt; other rows have a column `reference`"
    if tasks.path and tasks.mixture:
        yield "tasks.mixture", "must be empty: the rows of tasks.path name the environments"
    if tasks.path and tasks.train:
        yield "tasks.train", "must be 0: the rows of tasks.path determine the number of tasks"
    for name in ("solved", "failed"):
        repeats = tasks.train or tasks.path or tasks.synthetic
        if getattr(tasks, name) != 1 and not repeats:
            yield f"tasks.{name}", "must be 1: with tasks.train=0 no task repeats"
    for index, part in enumerate(tasks.mixture):
        if not part.env:
            yield f"tasks.mixture[{index}].env", "must name an environment"
        check_plain(f"tasks.mixture[{index}].params", part.params)


def served_tools(config: Config) -> Iterator[tuple[str, str]]:
    """Refuse tools of a server where nothing calls them, and what is neither URL nor command."""
    served = config.env.tools
    is_url = served.mcp.startswith(("http://", "https://"))
    if served.key_env and not is_url:
        yield "env.tools.key_env", "needs an http(s) URL in env.tools.mcp"
    if not served.mcp:
        return
    if not is_url:
        try:
            words = shlex.split(served.mcp)
        except ValueError as error:
            yield "env.tools.mcp", f"is neither an http(s) URL nor a command: {error}"
        else:
            if not words:
                yield "env.tools.mcp", "is neither an http(s) URL nor a command"
    if config.launch.kind == "serial":
        yield "env.tools.mcp", "needs real time, and launch.kind=serial has a virtual clock"
    if config.questioning.kind != "none":
        yield "env.tools.mcp", "must be empty: questioning.kind explores the environment alone"


def eval_sets(config: Config) -> Iterator[tuple[str, str]]:
    """Refuse names, samples, intervals and parameters of sets that cannot work."""
    every, tasks = config.eval.every, config.tasks
    for name, chosen in config.eval.sets.items():
        key = f"eval.sets.{name}"
        if not (name.isascii() and name.isidentifier()):
            yield key, "must be named by a plain identifier: it is part of names of metrics"
        if name == FINAL_SET:
            yield key, "is the name of the set of the end (eval.final_episodes); choose another"
        if chosen.k > 1 and not chosen.temperature:
            yield f"{key}.k", f"must be 1: at temperature 0 all samples are alike, is {chosen.k}"
        if chosen.guided and (config.experience.kind == "none" or config.rollout.agent):
            yield f"{key}.guided", "needs experience.kind, and turns of ours (no rollout.agent)"
        if chosen.every and not every:
            yield f"{key}.every", "must be 0: eval.every=0 evaluates only after each stage"
        if every and chosen.every % every:
            limit = f"must be a multiple of eval.every ({every})"
            yield f"{key}.every", f"{limit}, with which it is evaluated, is {chosen.every}"
        if chosen.env.params and not chosen.env.name and (tasks.path or tasks.mixture):
            given = "tasks.path" if tasks.path else "tasks.mixture"
            yield f"{key}.env.params", f"need {key}.env.name: {given} has several environments"
        check_plain(f"{key}.env.params", chosen.env.params)
