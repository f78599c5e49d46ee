"""A small trained policy in its exported directory, and episodes that any generation plays."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from serial_runs import trainer

from actors import evaluate
from actors.envs.base import make_env
from actors.formats.chat import Chat
from actors.formats.turns import SEPARATOR
from actors.rollout.conversation import system_message
from actors.rollout.episode_config import Setting, setting_of
from evolver_async.buffer.stages import source_of
from evolver_async.buffer.tasks.task_source import held_out_task
from evolver_async.checkpoint import checkpoints as checkpoint
from evolver_async.checkpoint import shards
from evolver_async.config import Config
from evolver_async.config.load import load, stage_config
from evolver_async.model.tokenizer import load_tokenizer
from evolver_async.randomness import key
from evolver_async.schema import Role, Task, Trajectory
from evolver_async.weights.lora_receiver import whole
from learner.tools.export import export

EPISODES = 24
RECIPE = """
env: {name: frozen_lake, params: {size: 3, slippery: false}}
policy: {max_length: 512, hidden_size: 64, layers: 1, heads: 2, intermediate_size: 96}
rollout: {group_size: 1, max_turns: 5, max_tokens: 12}
actors: {count: 1, groups: 8}
learner: {groups_per_step: 16, minibatches: 1, lr: 5.0e-3, decay: none}
stages: [{kind: sft, steps: 20, expert_fraction: 0.7}]
eval: {every: 0, episodes: 4, final_episodes: 0}
launch: {kind: serial}
"""
Reply = Callable[[list[dict[str, str]]], str]


@dataclass(frozen=True)
class Exported:
    """A run's policy: `directory` holds the export, `texts` what every turn of every held-out
    episode said in our own evaluation, the forced prefix included, and `success` how it ended."""

    directory: Path
    config: Config
    setting: Setting
    tasks: list[Task]
    texts: list[list[str]]
    success: list[bool]


def make_export(directory: Path, *changes: str) -> Exported:
    """Train, export, and play the held-out tasks as `evolver-async eval` does."""
    run_dir = trainer(directory, RECIPE)("run", *changes).run_dir
    export(run_dir, directory / "export")
    config = stage_config(load(run_dir / "config.yaml", []), 0)
    newest, _ = checkpoint.load_newest(run_dir / "checkpoints", run_dir.name)
    tasks = [held_out_task(source_of(config), number) for number in range(EPISODES)]
    weights = whole(shards.read(newest, "model"), config.policy, config.policy.decided_dtype)
    drawn = [evaluate.Drawn(task, 0, config.eval.temperature) for task in tasks]
    played = asyncio.run(evaluate.play_all(config, 0, drawn, weights))
    played.sort(key=lambda trajectory: trajectory.group_id)
    setting = setting_of(config, Chat(load_tokenizer(config.policy.path)), "test", 0)
    return Exported(
        directory=directory / "export",
        config=config,
        setting=setting,
        tasks=tasks,
        texts=[texts_of(setting, trajectory) for trajectory in played],
        success=[trajectory.success for trajectory in played],
    )


def texts_of(setting: Setting, trajectory: Trajectory) -> list[str]:
    """What each turn of an episode of one context said."""
    (sequence,) = trajectory.sequences
    texts = []
    for turn in range(int(sequence.turns.max()) + 1):
        wrote = (sequence.turns == turn) & (sequence.roles == Role.ACTION)
        tokens = sequence.tokens[np.flatnonzero(wrote)].tolist()
        texts.append(setting.format.prefix + setting.chat.text_of(tokens))
    return texts


def play(exported: Exported, number: int, reply: Reply) -> tuple[list[str], bool]:
    """Episode `number`, whose turns `reply` appends to a conversation; the turns and success."""
    task, setting = exported.tasks[number], exported.setting
    env = make_env(task.env, task.params)
    seen = env.reset(task, key(key(exported.config.run.seed, "eval", number), 0))
    system = system_message(setting, env)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": seen}]
    texts, success = [], False
    for _ in range(setting.max_turns):
        texts.append(reply(messages))
        assert messages[-1] == {"role": "assistant", "content": texts[-1]}
        actions = setting.format.parse(texts[-1].removeprefix(setting.format.prefix))
        outputs, valid = [], actions is not None
        for action in actions or []:
            assert isinstance(action, str) and SEPARATOR not in action
            step = env.step(action)
            outputs.append(step.observation)
            valid, success = valid and step.info.valid, step.info.success
            if step.terminated or step.truncated:
                return texts, success
        messages.append({"role": "user", "content": setting.format.shown(outputs, valid, seen)})
        seen = outputs[-1] if outputs else seen
    return texts, success
