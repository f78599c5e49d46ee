"""Stages of a run as the buffer needs them: their numbers and tasks, from the configuration."""

import hashlib
from dataclasses import replace
from typing import Literal

import msgspec

from evolver_async.buffer.state.admission import StageNumbers
from evolver_async.buffer.tasks.data_files import DataTasks, data_tasks
from evolver_async.buffer.tasks.row_files import rows_of
from evolver_async.buffer.tasks.rows import GivenTasks, given_tasks
from evolver_async.buffer.tasks.task_source import EvalSet, MixturePart, TaskSource
from evolver_async.config import Config, ConfigError
from evolver_async.config.sections.run import FINAL_SET
from evolver_async.splits import Split

TICKETS: dict[str, Literal["rollout", "demo", "branch"]] = {
    "sft": "demo",
    "text": "demo",
    "world_model": "branch",
    "reflect": "branch",
    "rl": "rollout",
    "reward_model": "rollout",
    "dpo": "rollout",
    "kto": "rollout",
}  # the kind of ticket that a stage trains on, by kind of stage


def ticket_kind(config: Config, kind: str) -> Literal["rollout", "demo", "branch"]:
    """Return the kind of ticket that a stage with this configuration trains on, that of the played
    groups where rows are beside them."""
    rows = config.data.path and config.data.weight in (0, 1)
    return "demo" if rows and TICKETS[kind] == "rollout" else TICKETS[kind]


def numbers_of(config: Config, kind: str) -> StageNumbers:
    """Read the numbers of a stage of this kind from its configuration."""
    buffer, selection = config.buffer, config.selection
    refills = selection.max_refills if selection.facts.refills else 0
    return StageNumbers(
        kind=ticket_kind(config, kind),
        group_size=config.rollout.group_size,
        groups_per_step=config.learner.groups_per_step,
        max_staleness=buffer.max_staleness,
        reuse=buffer.reuse,
        weight_lag=config.actors.weight_lag,
        sampler=buffer.sampler,
        sampler_params=buffer.params,
        wait=buffer.straggler == "wait",
        # a row is a small group: as many as two steps need are no burden
        demo_groups=max(buffer.demo_groups, 2 * config.learner.groups_per_step)
        if config.data.path
        else buffer.demo_groups,
        refills=refills * config.learner.groups_per_step,
        by_success=selection.by == "success",
        repeats_failed=config.rollout.guided == "failed",
    )


def source_of(config: Config) -> TaskSource:
    """Make the source of a stage's tasks. Raises ConfigError if a file of `tasks.path` is bad."""
    tasks = config.tasks
    given = None
    if tasks.path:
        given = given_tasks(rows_of(tasks), config.env.name, config.env.params, tasks.answer)
        needed: dict[str, Split] = {"training": "train", "eval.split": _deciding(config, given)}
        if config.data.path and config.data.weight in (0, 1):
            del needed["training"]
        if not config.eval.episodes:
            del needed["eval.split"]
        for wanted, split in needed.items():
            if not given.count(split):
                missing = f"has no task of the {split} split, for {wanted}"
                counts = given.rows.meta.counts.items()
                there = ", ".join(f"{count} of {name}" for name, count in counts)
                raise ConfigError(f"tasks.path: {tasks.path} {missing}; it has {there}")
    data, beside, share = None, None, config.data.weight
    if config.data.path:
        members = config.rollout.group_size if share else 0  # of an rl stage, which alone has one
        data = data_tasks(config.data, config.env.name, config.env.params, members)
    if 0 < share < 1 and isinstance(data, DataTasks):  # tasks are refused by their form
        data, beside = None, data
    rows = given if data is None else data
    return TaskSource(
        env=config.env.name,
        params=config.env.params,
        train=tasks.train if rows is None else rows.count("train"),
        solved=tasks.solved,
        failed=tasks.failed,
        evaluated=_deciding(config, given),
        mixture=tuple(MixturePart(part.env, part.params, part.weight) for part in tasks.mixture),
        given=given,
        data=data,
        beside=beside,
        share=share,
        greedy=config.eval.temperature == 0,
    )


def _deciding(config: Config, given: GivenTasks | None) -> Split:
    """Return the split by which a stage decides: test only where rows have no validation split."""
    if config.eval.split != "auto":
        return config.eval.split
    return "validation" if given is None or given.count("validation") else "test"


def evaluation_digest(config: Config) -> str:
    """Return the identity of a stage's evaluations: success is comparable where it is equal.

    It covers the held-out tasks, the length of their episodes, the temperature, and what a success
    is.
    """
    source = source_of(config)
    tasks = source.parts if source.given is None else source.given.digest(source.evaluated)
    length = config.rollout.max_turns, config.rollout.actions_per_turn
    reward = config.reward.terms, config.reward.success, config.reward.threshold
    facts = tasks, source.evaluated, length, config.eval.temperature, reward
    plain = msgspec.to_builtins(facts, str_keys=True)  # parameters may have integers as keys
    return hashlib.sha256(msgspec.json.encode(plain, order="deterministic")).hexdigest()


def eval_sets_of(config: Config) -> dict[str, EvalSet]:
    """Make the sets of `eval.sets` for a stage, in their order, and that of the end of the run.

    A set that names no environment has the stage's tasks, with the set's parameters over theirs.
    The one of the end has tasks of the split test, unless these decide or there are none.
    """
    stage, made = source_of(config), dict[str, EvalSet]()
    for name, chosen in config.eval.sets.items():
        source = stage
        if chosen.env.name:
            source = TaskSource(chosen.env.name, chosen.env.params, train=0)
        elif chosen.env.params:
            source = replace(stage, params=stage.params | chosen.env.params)
        split = source.evaluated if chosen.split == "auto" else chosen.split
        if source.given is not None and not source.given.count(split):
            missing = f"has no task of the {split} split"
            raise ConfigError(f"eval.sets.{name}.split: {config.tasks.path} {missing}")
        numbers = chosen.first, chosen.tasks, chosen.k
        made[name] = EvalSet(source, split, *numbers, chosen.temperature, chosen.guided)
    tasks = config.eval.final_episodes if config.eval.episodes else 0
    if stage.given is not None:
        tasks = min(tasks, stage.given.count("test"))
    if tasks and stage.evaluated != "test":
        made[FINAL_SET] = EvalSet(stage, "test", 0, tasks, 1, config.eval.temperature)
    return made
