"""Checks that need the run's model directory: its positions must hold the context, a first prompt
must leave room for a turn, and a first demonstrated turn must be one that a rollout could write."""

import asyncio
import random

from actors.checks.config import of_set, placed
from actors.envs.base import EnvError, Solvable, begun, one_line
from actors.formats.chat import Chat
from actors.rollout.conversation import first_prompt
from actors.rollout.episode_config import Setting, setting_of
from actors.scripted.branching import BranchState, TriedTurn, reflect_rows, try_turns
from evolver_async.buffer.stages import TICKETS, eval_sets_of, source_of
from evolver_async.config import Config, ConfigError
from evolver_async.config.load import stage_config
from evolver_async.model.positions import positions
from evolver_async.model.tokenizer import load_tokenizer
from evolver_async.schema import Task


def check(config: Config) -> None:
    """Raise ConfigError for a directory without tokenizer or configuration, naming
    `policy.max_length` if the model has fewer positions or the first prompt of an environment
    leaves no room for a turn, and naming `rollout.max_tokens` if a first demonstrated turn is too
    long."""
    path, longest = config.policy.path, config.policy.max_length
    try:
        chat, most = Chat(load_tokenizer(path)), positions(path, config.engine.kind)
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.path: {' '.join(str(error).split())}") from error
    if most is not None and longest > most:
        raise ConfigError(f"policy.max_length: is {longest}, but the model has {most} positions")
    for index in range(len(config.stages)):
        staged = stage_config(config, index)
        stage, source = config.stages[index], source_of(staged)
        demonstrates = TICKETS[stage.kind] == "branch" or (
            stage.kind == "sft" and stage.expert_fraction > 0
        )
        setting = setting_of(staged, chat, "", 0)
        for task in source.examples():
            with placed(source, task):
                _check_first(staged, setting, task, stage.kind == "reflect")
                if demonstrates:
                    _check_demonstration(staged, setting, task)
        for task in source.examples(source.evaluated):
            with placed(source, task):
                _check_first(staged, setting, task, False)
        for name, chosen in eval_sets_of(staged).items():
            for task in chosen.examples():
                try:
                    _check_first(staged, setting, task, False)
                except ValueError as error:
                    raise ConfigError(of_set(name, error)) from error


def _check_first(config: Config, setting: Setting, task: Task, reflects: bool) -> None:
    try:
        prompt, turns = asyncio.run(_begun(setting, task, reflects))
    except EnvError:
        raise
    except Exception as error:
        said = f"{task.env} cannot begin a task: {one_line(error)}"
        raise ConfigError(f"env.name: {said}") from error
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


def _check_demonstration(config: Config, setting: Setting, task: Task) -> None:
    """Refuse a first turn that is too long; later ones fail as what an environment does."""
    try:
        length = asyncio.run(_first_turn(setting, task))
    except Exception as error:
        said = f"{task.env} cannot demonstrate a task: {one_line(error)}"
        raise ConfigError(f"env.name: {said}") from error
    if length > config.rollout.max_tokens:
        small = f"is too small for a demonstrated turn of {task.env}: {length} tokens"
        raise ConfigError(f"rollout.max_tokens: {config.rollout.max_tokens} {small}")


async def _first_turn(setting: Setting, task: Task) -> int:
    """Return the number of tokens of the first turn in the expert's episode."""
    style = setting.format
    async with begun(task) as (env, _):
        assert isinstance(env, Solvable), f"{task.env} cannot demonstrate"
        actions = env.solve()[: style.actions_per_turn]
        return len(setting.chat.turn(style.render_actions(actions), style.stop_strings))


async def _begun(setting: Setting, task: Task, reflects: bool) -> tuple[list[int], list[TriedTurn]]:
    """Return the first prompt of a task and, if reasons are asked for, turns to give reasons
    about."""
    async with begun(task) as (env, observation):
        turns = try_turns(env, setting.format, 1, random.Random(0)) if reflects else []
        return first_prompt(setting, env, observation), turns
