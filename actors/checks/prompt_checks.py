"""Checks that need the run's model directory: its positions must hold the context, a first prompt
must leave room for a turn, and a first demonstrated turn must be one that a rollout could write and
read."""

import asyncio
import random

from actors.checks.config import of_set, placed
from actors.envs.base import EnvError, Solvable, begun, one_line
from actors.formats.chat import Chat
from actors.formats.tool_calls import CODE_TOOL, InvalidCall, called
from actors.rollout.conversation import first_prompt, tools_of
from actors.rollout.episode_config import Setting, setting_of
from actors.scripted.branching import (
    BranchState,
    TriedTurn,
    reflect_rows,
    restorable,
    try_turns,
)
from actors.scripted.recorded import ConversationRenderer, check_rendered
from evolver_async.buffer.stages import eval_sets_of, source_of
from evolver_async.buffer.tasks.data_files import DataTasks
from evolver_async.config import Config, ConfigError
from evolver_async.config.load import stage_config
from evolver_async.config.sections.run import BRANCHED
from evolver_async.extension import RAISED
from evolver_async.model.positions import positions
from evolver_async.model.tokenizer import load_tokenizer
from evolver_async.schema import Task


def check(config: Config) -> int:
    """Return the tokens of the longest first prompt among the tasks that are looked at.

    Raise ConfigError for a directory without tokenizer or configuration, naming
    `policy.max_length` if the model has fewer positions or the first prompt of an environment
    leaves no room for a turn, and naming `rollout.max_tokens` if a first demonstrated turn is too
    long."""
    path, longest = config.policy.path, config.policy.max_length
    try:
        chat = Chat(load_tokenizer(path), config.rollout.template)
        most = positions(path, config.engine.kind)
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.path: {' '.join(str(error).split())}") from error
    if most is not None and longest > most:
        raise ConfigError(f"policy.max_length: is {longest}, but the model has {most} positions")
    found = 0
    for index in range(len(config.stages)):
        staged = stage_config(config, index)
        stage, source = config.stages[index], source_of(staged)
        shows_expert = stage.kind == "sft" and stage.expert_fraction > 0
        shows_others = stage.kind == "sft" and stage.expert_fraction < 1
        if stage.kind in BRANCHED:
            shows_expert = shows_others = True
        setting = setting_of(staged, chat, "", 0)
        if isinstance(source.learnt, DataTasks):
            check_rendered(ConversationRenderer(chat, staged), source.learnt, stage.kind)
        for task in () if isinstance(source.data, DataTasks) else source.examples():
            with placed(source, task):
                first = _check_first(staged, setting, task, stage.kind == "reflect")
                found = max(found, first)
                if shows_expert or shows_others:
                    _check_demonstration(staged, setting, task, shows_expert, shows_others)
        for task in source.examples(source.evaluated) if staged.eval.episodes else ():
            with placed(source, task):
                _check_first(staged, setting, task, False)
        for name, chosen in eval_sets_of(staged).items():
            for task in chosen.examples():
                try:
                    _check_first(staged, setting, task, False)
                except ValueError as error:
                    raise ConfigError(of_set(name, error)) from error
    return found


def _check_first(config: Config, setting: Setting, task: Task, reflects: bool) -> int:
    """Return the tokens of a task's first prompt."""
    try:
        prompt, turns = asyncio.run(_begun(setting, task, reflects))
    except (EnvError, ConfigError):
        raise
    except RAISED as error:
        problem = f"{task.env} cannot begin a task: {one_line(error)}"
        raise ConfigError(f"env.name: {problem}") from error
    needed = len(prompt) + config.rollout.max_tokens
    if needed > config.policy.max_length:
        purpose = f"a first prompt of {len(prompt)} tokens and a turn of rollout.max_tokens"
        short = f"{config.policy.max_length} is too short for {purpose}: at least {needed}"
        raise ConfigError(f"policy.max_length: {short}")
    if turns:
        try:
            state = BranchState(0, prompt, turns[0], turns[1:])
            reflect_rows(state, setting, config.rollout.max_tokens)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return len(prompt)


def _check_demonstration(
    config: Config, setting: Setting, task: Task, expert: bool, others: bool
) -> None:
    """Refuse first turns of the `expert`, or of `others` that play the environment's actions, that
    the turn format itself cannot read, and one of the expert that is too long; later ones fail as
    what an environment does."""
    style = setting.format
    try:
        turns = asyncio.run(_first_turns(setting, task, expert, others))
        texts = [style.render_actions(actions) for actions in turns]
        read = [style.parse(text) for text in texts]
    except RAISED as error:
        problem = f"{task.env} cannot demonstrate a task: {one_line(error)}"
        raise ConfigError(f"env.name: {problem}") from error
    for actions, text, found in zip(turns, texts, read, strict=True):
        if not _same(style.tools, actions, found):
            seen = "reads nothing in it" if found is None else f"reads {found!r} in it"
            raise ConfigError(
                f"rollout.format: {setting.format_name} cannot show a demonstration of {task.env},"
                f" as it {seen}: {style.prefix + text!r}; choose another format"
            )
    length = len(setting.chat.turn(texts[0], style.stop_strings))
    if expert and length > config.rollout.max_tokens:
        small = f"is too small for a demonstrated turn of {task.env}: {length} tokens"
        raise ConfigError(f"rollout.max_tokens: {config.rollout.max_tokens} {small}")


def _same(tools: bool, actions: list[str], found: list[str | InvalidCall] | None) -> bool:
    """Return True if the actions that were read are those that were written, calls of tools in
    whatever spelling."""
    if found is None or any(isinstance(one, InvalidCall) for one in found):
        return False
    read = [one for one in found if isinstance(one, str)]
    if tools:
        return [*map(called, read)] == [*map(called, actions)]
    return read == [action.strip() for action in actions]


async def _first_turns(setting: Setting, task: Task, expert: bool, others: bool) -> list[list[str]]:
    """Return the actions of first turns: the expert's first, then one of each action there is."""
    async with begun(task) as (env, _):
        count, turns = setting.format.actions_per_turn, list[list[str]]()
        if expert and task.reference:
            turns = [task.reference[:count]]
        elif expert:
            assert isinstance(env, Solvable), f"{task.env} cannot demonstrate"
            turns = [env.solve()[:count]]
        shown = env.actions() if others and isinstance(env, Solvable) else ()
        return turns + [[action] for action in shown]


async def _begun(setting: Setting, task: Task, reflects: bool) -> tuple[list[int], list[TriedTurn]]:
    """Return the first prompt of a task and, if reasons are asked for, turns to give reasons
    about."""
    async with begun(task) as (env, opening):
        turns = list[TriedTurn]()
        if reflects and restorable(env):
            given = task.reference and task.reference[: setting.format.actions_per_turn]
            turns = try_turns(env, setting.format, 1, random.Random(0), given)
        specs = await tools_of(setting, env)
        if setting.format.inline and not specs:
            lacks = f"{setting.format_name} needs a tool {CODE_TOOL} of {task.env}"
            raise ConfigError(f"rollout.format: {lacks}")
        return first_prompt(setting, env, opening, specs), turns
