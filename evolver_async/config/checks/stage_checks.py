"""Checks of stages and tasks against the other sections."""

import shlex
from collections.abc import Iterator

from evolver_async.config.sections import Config
from evolver_async.config.sections.data import DATA_COLUMNS
from evolver_async.config.sections.reward import REWARD_MODEL
from evolver_async.config.sections.run import FINAL_SET, PAIRED, SUPERVISED
from evolver_async.config.values.rules import check_plain


def stages(config: Config) -> Iterator[tuple[str, str]]:
    """Require at least one stage, and a limit of every stage."""
    if not config.stages:
        yield "stages", "needs at least one stage"
    for index, stage in enumerate(config.stages):
        limits = stage.steps, stage.epochs, stage.tokens, stage.hours, stage.until_success
        if not any(limits):
            yield f"stages[{index}]", "has no limit: set steps, tokens, hours or until_success"


def limits(config: Config, index: int) -> Iterator[tuple[str, str]]:
    """Require what the limits and the kind of a stage need from other sections."""
    stage, where = config.stages[index], f"stages[{index}]"
    rows, steps = config.data.path, stage.steps or stage.epochs
    limited = steps or stage.tokens or stage.hours
    if stage.epochs and not rows:
        yield f"{where}.epochs", "counts passes over the rows of data.path: set it, or steps"
    if stage.epochs and stage.steps:
        yield f"{where}.epochs", f"must be 0: {where}.steps is {stage.steps}"
    if rows and config.safety.max_reward < 1:
        yield "safety.max_reward", f"must be at least 1: rows of {where} have rewards of 1 and 0"
    if stage.kind == "text" and not rows:
        yield f"{where}.data.path", "must name rows: a stage of kind text learns texts of files"
    for name in config.data.columns if rows else ():
        if name not in DATA_COLUMNS:
            yield f"data.columns.{name}", f"must be one of {', '.join(DATA_COLUMNS)}"
    if not limited and not (config.eval.every and config.eval.episodes):
        none = "eval.every" if config.eval.episodes else "eval.episodes"
        yield f"{where}.until_success", f"needs evaluations, or another limit: {none} is 0"
    if stage.kind != "rl" and not limited:
        yield (
            f"{where}.until_success",
            f"a stage of kind {stage.kind} is evaluated only after its end: set steps, tokens or"
            " hours",
        )
    if stage.kind in PAIRED and config.rollout.group_size == 1 and not rows:
        yield "rollout.group_size", f"must be at least 2: {where} compares members of a group"
    if (decay := config.learner.decay) != "none" and not steps:
        yield f"{where}.steps", f"must be set: learner.decay={decay} runs over the stage's steps"
    decays = "alpha_final" in config.advantage.facts.reads and config.advantage.alpha_final >= 0
    if stage.kind == "rl" and decays and not stage.steps:
        yield f"{where}.steps", "must be set: advantage.alpha_final is reached at the last step"
    groups = config.learner.groups_per_step
    if stage.kind in SUPERVISED and config.buffer.demo_groups < groups and not rows:
        least = f"must be at least learner.groups_per_step ({groups})"
        yield "buffer.demo_groups", f"{least}, or {where} never fills a step"


def reward_models(config: Config, index: int) -> Iterator[tuple[str, str]]:
    """Require a model where a term scores by one, and whole weights where one is trained."""
    stage, where = config.stages[index], f"stages[{index}]"
    if stage.kind == REWARD_MODEL and config.policy.lora.rank:
        yield "policy.lora.rank", f"must be 0: {where} trains a whole reward model"
    if all(term.name != REWARD_MODEL for term in config.reward.terms):
        return
    model = config.reward.model
    if model.path and model.url:
        yield "reward.model.url", "must be empty where reward.model.path is set"
    if model.url and config.launch.kind == "serial":
        yield "reward.model.url", "needs real time, and launch.kind=serial has a virtual clock"
    trained = any(one.kind == REWARD_MODEL for one in config.stages[:index])
    if not (model.path or model.url or trained):
        yield (
            "reward.terms",
            f"{REWARD_MODEL} in {where} needs a model: set reward.model.path or reward.model.url,"
            f" or train one in a stage of kind {REWARD_MODEL} before",
        )


def tasks(config: Config) -> Iterator[tuple[str, str]]:
    """Refuse keys of `tasks` that exclude each other."""
    tasks = config.tasks
    check_plain("env.params", config.env.params)
    if tasks.answer and not tasks.prompt:
        yield "tasks.answer", "needs tasks.prompt; other rows have a column `reference`"
    if tasks.path and tasks.mixture:
        yield "tasks.mixture", "must be empty: the rows of tasks.path name the environments"
    if tasks.path and tasks.train:
        yield "tasks.train", "must be 0: the rows of tasks.path determine the number of tasks"
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
        if chosen.guided and config.rollout.agent:
            yield f"{key}.guided", "must be false: rollout.agent writes its own prompts"
        if every and chosen.every % every:
            limit = f"must be a multiple of eval.every ({every})"
            yield f"{key}.every", f"{limit}, with which it is evaluated, is {chosen.every}"
        if chosen.env.params and not chosen.env.name and (tasks.path or tasks.mixture):
            given = "tasks.path" if tasks.path else "tasks.mixture"
            yield f"{key}.env.params", f"need {key}.env.name: {given} has several environments"
        check_plain(f"{key}.env.params", chosen.env.params)
