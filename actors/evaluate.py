"""Evaluation of a checkpoint on held-out tasks and on the sets of `eval.sets`, never guided."""

import asyncio
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from actors.endpoint.runner import JudgementMissing, RewardMissing, make_agents
from actors.engines.factory import load_engine
from actors.envs.base import EnvironmentFailure
from actors.envs.exact import exact
from actors.envs.tool_server import close_tool_servers
from actors.formats.chat import Chat
from actors.rewards.facts import Unscorable
from actors.rewards.scorer import RewardScorer, own_model
from actors.rollout.environment import abandoned_closed
from actors.rollout.episode import EpisodeLate
from actors.rollout.episode_config import setting_of
from actors.rollout.finished import Finished
from actors.rollout.group import run_group
from actors.ticket_progress import TicketProgress
from evolver_async import intervals
from evolver_async.buffer.stages import eval_sets_of, source_of
from evolver_async.buffer.tasks.task_source import EvalSet, held_out_task
from evolver_async.checkpoint import history, shards
from evolver_async.config import Config
from evolver_async.config.effective.changes import with_values
from evolver_async.config.load import stage_config
from evolver_async.config.sections.rollout import USERS
from evolver_async.launch.run_directory import config_of
from evolver_async.metrics.replies import SavedReply
from evolver_async.metrics.replies import save as save_replies
from evolver_async.model import gguf
from evolver_async.model.tokenizer import load_tokenizer
from evolver_async.randomness import key
from evolver_async.rewards import player_means, term_means
from evolver_async.schema import Role, Sampling, Task, Ticket, Trajectory, WeightId
from evolver_async.splits import Split

FAILED = EnvironmentFailure, EpisodeLate, JudgementMissing, RewardMissing, Unscorable


def evaluate(
    run_dir: Path,
    episodes: int,
    step: int | str | None = None,
    split: Split | None = None,
    save: Path | None = None,
) -> str:
    """Run the first `episodes` tasks of a split (None: of `eval.split`), then the sets of
    `eval.sets`.

    Return a line for each. `save`: the file of all episodes. ValueError where an episode fails: an
    average over the others would be of other tasks.
    """
    config = config_of(run_dir, [f"eval.split={split}"] if split else [])
    chosen, manifest = history.choose(
        run_dir / "checkpoints", config.run.name or run_dir.name, step
    )
    weights = shards.read(chosen, "model")
    model = config.reward.model
    if not (model.path or model.url):
        path = str(own_model(config, len(config.stages) - 1, run_dir))
        config = with_values(config, {"reward.model.path": path})
    return _evaluated(config, f"{run_dir}, step {manifest.step}", episodes, weights, save)


def evaluate_model(config: Config, episodes: int, save: Path | None = None) -> str:
    """Evaluate the untouched model of a recipe as `evaluate` does that of a checkpoint."""
    path = config.policy.path
    if not path.endswith(gguf.SUFFIX):
        return _evaluated(config, path, episodes, None, save)
    with tempfile.TemporaryDirectory(prefix="evolver-gguf-") as held:
        directory = Path(held) / "policy"
        gguf.convert(Path(path), directory)
        policy = replace(config.policy, path=str(directory))
        return _evaluated(replace(config, policy=policy), path, episodes, None, save)


def _evaluated(
    config: Config, name: str, episodes: int, weights: dict | None, save: Path | None
) -> str:
    """Play the episodes of the last stage; `weights`: None for those of the policy directory."""
    if config.rollout.agent == USERS:
        raise ValueError("rollout.agent: users play no held-out tasks; evaluate an export instead")
    last = len(config.stages) - 1
    staged = stage_config(config, last)
    source = source_of(staged)
    episodes = source.episodes(episodes)
    tasks = [held_out_task(source, number) for number in range(episodes)]
    drawn = [Drawn(task, 0, config.eval.temperature) for task in tasks]
    trajectories = asyncio.run(play_all(staged, last, drawn, weights))
    replies = Replies(staged, name) if save is not None else None
    if replies is not None:
        replies.add("", drawn, trajectories)
    success = statistics.fmean(trajectory.success for trajectory in trajectories)
    reward = statistics.fmean(trajectory.reward for trajectory in trajectories)
    bounds = intervals.written(intervals.share(success, _distinct(trajectories)))
    line = f"{name}: success {success:.3f} ({bounds}), reward {reward:.3f}"
    means = term_means(trajectories) | player_means(trajectories)
    line += "".join(f", {term} {value:.3f}" for term, value in means.items())
    line += f" over {episodes} {source.evaluated} episodes, {_distinct(trajectories)} distinct"
    values = exact(tasks, staged.rollout.max_turns * staged.rollout.actions_per_turn)
    if values is not None:
        line += f" (random policy {values.random:.3f}, optimal policy {values.optimal:.3f}, exactly"
        if values.random_return is not None and values.optimal_return is not None:
            line += f"; rewards {values.random_return:.3f} and {values.optimal_return:.3f}"
        line += ")"
    lines = [line]
    made = eval_sets_of(staged)
    for set_name in staged.eval.sets:  # not that of the end
        one = made[set_name]
        found = asyncio.run(_evaluate_set(staged, last, set_name, one, weights, replies))
        lines.append(f"{set_name}: {found}")
    if save is not None and replies is not None:
        save_replies(save, replies.rows)
        lines.append(f"{len(replies.rows)} episodes are in {save}")
    return "\n".join(lines)


async def _evaluate_set(
    config: Config,
    stage: int,
    name: str,
    chosen: EvalSet,
    weights: dict | None,
    replies: "Replies | None",
) -> str:
    """Play one set of `eval.sets`; return its averages in words."""
    drawn = [
        Drawn(chosen.task(number), sample, chosen.temperature)
        for number in range(chosen.tasks)
        for sample in range(chosen.k)
    ]
    trajectories = await play_all(config, stage, drawn, weights)
    if replies is not None:
        replies.add(name, drawn, trajectories)
    by_task: dict[int, list[Trajectory]] = {}
    for one in trajectories:
        by_task.setdefault(one.group_id // chosen.k, []).append(one)
    k, groups = chosen.k, by_task.values()
    means = {
        f"avg@{k}": statistics.fmean(one.success for one in trajectories),
        f"best@{k}": statistics.fmean(any(one.success for one in group) for group in groups),
        "reward": statistics.fmean(one.reward for one in trajectories),
        f"best reward@{k}": statistics.fmean(max(one.reward for one in group) for group in groups),
    }
    means |= term_means(trajectories) | player_means(trajectories)
    said = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
    return f"{said} over {chosen.tasks} tasks, {_distinct(trajectories)} distinct"


def _distinct(trajectories: list[Trajectory]) -> int:
    """Count the different tasks that were played."""
    return len({one.content for one in trajectories})


class Drawn(NamedTuple):
    """One episode to play: its task, the number of the sample, and the temperature."""

    task: Task
    sample: int
    temperature: float


class Replies:
    """Episodes as text, for `--save`; `evaluated` names the model."""

    def __init__(self, config: Config, evaluated: str) -> None:
        self.evaluated = evaluated
        self.rows: list[SavedReply] = []
        self._chat = Chat(load_tokenizer(config.policy.path), config.rollout.template)

    def add(self, set_name: str, drawn: list[Drawn], trajectories: list[Trajectory]) -> None:
        """Add the episodes of a set in the order of their tasks."""
        for one in sorted(trajectories, key=lambda one: one.group_id):
            task, sample, _ = drawn[one.group_id]
            prompt, reply = self._texts(one)
            self.rows.append(
                SavedReply(
                    evaluated=self.evaluated,
                    set_name=set_name,
                    task=task.task_id,
                    sample=sample,
                    success=one.success,
                    reward=one.reward,
                    turns=len(one.turn_rewards),
                    prompt=prompt,
                    reply=reply,
                    terms=one.terms,
                    metrics=one.metrics,
                )
            )

    def _texts(self, trajectory: Trajectory) -> tuple[str, str]:
        """Return what was read before the first turn, and what follows it in every context."""
        prompt, replies = "", list[str]()
        for number, sequence in enumerate(trajectory.sequences):
            acts = np.flatnonzero(sequence.roles == Role.ACTION)
            start = int(acts[0]) if len(acts) else len(sequence)
            prompt = prompt if number else self._chat.decoded(sequence.tokens[:start].tolist())
            replies.append(self._chat.decoded(sequence.tokens[start:].tolist()))
        return prompt, "\n…\n".join(replies)


async def play_all(
    config: Config, stage: int, drawn: list[Drawn], weights: dict | None
) -> list[Trajectory]:
    """Run the episodes; the group of a trajectory is the number of its episode in `drawn`."""
    held = WeightId(lineage=0, step=0)
    engine, tokenizer = load_engine(config, held, weights)
    chat = Chat(tokenizer, config.rollout.template)
    setting = setting_of(config, chat, "eval", 0)
    agents = make_agents(config, engine, chat)
    scorer = RewardScorer(config) if config.reward.terms else None
    trajectories: list[Trajectory] = []
    failures: list[str] = []
    room = asyncio.Semaphore(config.engine.slots)

    async def play(number: int, task: Task, sample: int, temperature: float) -> None:
        ticket = Ticket(
            group_id=number,
            task=task,
            kind="eval",
            stage=stage,
            members=[sample],
            guided=[],
            dynamics_seed=key(config.run.seed, "dynamics", "eval", task.task_id),
            attempt=0,
            weights=held,
            lease_s=0.0,
            sampling=Sampling(temperature=temperature, max_tokens=config.rollout.max_tokens),
        )
        played: list[Finished] = []
        async with room:
            try:
                if agents is None:
                    await run_group(ticket, setting, engine, TicketProgress(), played.append)
                else:
                    await agents.run(ticket, setting, TicketProgress(), played.append)
                for one in played:
                    ended = one if one.rewarded is None else await one.rewarded()
                    if scorer is not None:
                        await scorer.score(task, ended, setting, False, stage)
                    trajectories.append(ended.trajectory)
            except FAILED as failure:
                failures.append(f"{task.task_id}: {failure}")

    async with asyncio.TaskGroup() as group:
        for number, one in enumerate(drawn):
            group.create_task(play(number, *one))
    if agents is not None:
        await agents.close()
    if scorer is not None:
        await scorer.close()
    setting.idle.close()
    await abandoned_closed(config.env.step_timeout_s)
    await close_tool_servers()
    setting.idle.processes.close()
    await engine.close()
    if failures:
        raise ValueError(f"{len(failures)} of {len(drawn)} episodes failed, {failures[0]}")
    return trajectories
