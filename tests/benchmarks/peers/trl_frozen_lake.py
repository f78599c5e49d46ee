"""GRPOTrainer of TRL on the tasks of a recipe, until success on held-out tasks reaches a mark.

    trl_frozen_lake.py CONFIG.yaml MARK BATCH

It runs in the environment of the peer, with the recipe's last stage. `rollout_func` plays the
episodes of one generation with the project's environment, prompts and turn format; each of their
turns is one call of transformers' `generate`. After every `eval.every` steps of the recipe it plays
the held-out tasks, greedily, and prints a line of JSON: the step, the success, and the wall and
processor seconds since the beginning of `train`, without these evaluations.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_settings import ON_CPU, rewards

from actors.engines.engine import Generation, Request
from actors.formats.chat import Chat
from actors.rollout.episode_config import Setting, setting_of
from actors.rollout.finished import Finished
from actors.rollout.group import run_group
from actors.ticket_progress import TicketProgress
from evolver_async.buffer.stages import source_of
from evolver_async.buffer.tasks.task_source import held_out_task
from evolver_async.config import Config
from evolver_async.config.load import load, stage_config
from evolver_async.model.tokenizer import load_tokenizer
from evolver_async.randomness import key
from evolver_async.schema import Role, Sampling, Task, Ticket, Trajectory, WeightId

NONE = WeightId(lineage=0, step=0)
NO_LIMIT_S = 1e9
PAD = 0  # masked wherever it stands


@dataclass(eq=False)
class BatchedEngine:
    """Engine of `playing` episodes that generates a turn for all of them at once.

    It waits until every episode that still plays has asked. `stops`: tokens that end a turn.
    """

    model: Any
    stops: frozenset[int]
    playing: int
    waiting: list[tuple[Request, asyncio.Future[Generation]]] = field(default_factory=list)
    weights: WeightId | None = NONE

    async def generate(self, request: Request) -> Generation:
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((request, future))
        self._generate_if_complete()
        return await future

    def ended(self) -> None:
        """Note that an episode is over."""
        self.playing -= 1
        self._generate_if_complete()

    def release(self, session: str) -> None:
        """Hold nothing between turns."""

    def _generate_if_complete(self) -> None:
        if not self.waiting or len(self.waiting) < self.playing:
            return
        asked, self.waiting = self.waiting, []
        for (_, future), tokens in zip(
            asked, self._sampled([request for request, _ in asked]), strict=True
        ):
            future.set_result(
                Generation(
                    tokens=tokens, logprobs=[0.0] * len(tokens), weights=[NONE] * len(tokens)
                )
            )

    @torch.no_grad()
    def _sampled(self, requests: list[Request]) -> list[list[int]]:
        first, width = requests[0], max(len(request.tokens) for request in requests)
        tokens_BT = torch.full((len(requests), width), PAD)
        mask_BT = torch.zeros((len(requests), width), dtype=torch.long)
        for row, request in enumerate(requests):
            tokens_BT[row, width - len(request.tokens) :] = torch.tensor(request.tokens)
            mask_BT[row, width - len(request.tokens) :] = 1
        sampling = {"do_sample": True, "temperature": first.temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            max_new_tokens=first.max_tokens,
            eos_token_id=sorted(self.stops),
            pad_token_id=PAD,
            disable_compile=True,
            **(sampling if first.temperature else {"do_sample": False}),
        )
        out_BT = self.model.generate(
            input_ids=tokens_BT, attention_mask=mask_BT, generation_config=config
        )
        return [_turn(row, self.stops) for row in out_BT[:, width:].tolist()]


def _turn(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """Return the tokens up to the first that stops a turn."""
    ends = [place for place, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


class Player:
    """Episodes of a recipe's tasks."""

    def __init__(self, config: Config, chat: Chat) -> None:
        self.config, self.source = config, source_of(config)
        setting = setting_of(config, chat, "trl", 0)
        self.setting: Setting = replace(
            setting, step_timeout_s=NO_LIMIT_S, episode_timeout_s=NO_LIMIT_S
        )
        ends = [chat.tokens_of(text) for text in setting.format.stop_strings]
        assert all(len(one) == 1 for one in ends), "a stop string is not one token"
        self.stops = chat.stop_tokens.union(*ends)
        self.calls = 0

    def play(self, model: Any, tasks: list[Task], members: int, temperature: float) -> list:
        """Play all members of all tasks; return their trajectories in this order."""
        finished: list[Trajectory] = []
        engine = BatchedEngine(model, self.stops, playing=len(tasks) * members)
        self.calls += 1

        def deliver(episode: Finished) -> None:
            finished.append(episode.trajectory)
            engine.ended()

        async def play_all() -> None:
            async with asyncio.TaskGroup() as group:
                for number, task in enumerate(tasks):
                    ticket = Ticket(
                        group_id=number,
                        task=task,
                        kind="rollout" if temperature else "eval",
                        stage=0,
                        members=list(range(members)),
                        guided=[],
                        dynamics_seed=key(self.config.run.seed, "dynamics", task.task_id),
                        attempt=self.calls,
                        weights=NONE,
                        lease_s=0.0,
                        sampling=Sampling(
                            temperature=temperature, max_tokens=self.config.rollout.max_tokens
                        ),
                    )
                    progress = TicketProgress()
                    group.create_task(run_group(ticket, self.setting, engine, progress, deliver))

        asyncio.run(play_all())
        return sorted(finished, key=lambda one: (one.group_id, one.member))

    def success(self, model: Any) -> float:
        """Return the success on the held-out tasks."""
        number = self.config.eval.episodes
        tasks = [held_out_task(self.source, one) for one in range(number)]
        played = self.play(model, tasks, 1, self.config.eval.temperature)
        return statistics.fmean(one.success for one in played)

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        members = trainer.num_generations
        tasks = [self.source.task("train", int(prompt)) for prompt in prompts[::members]]
        rows: dict[str, list[Any]] = {
            name: [] for name in ("prompt_ids", "completion_ids", "env_mask", "score")
        }
        temperature = self.config.rollout.temperature
        for trajectory in self.play(trainer.model, tasks, members, temperature):
            (sequence,) = trajectory.sequences
            acts, tokens = sequence.roles == Role.ACTION, sequence.tokens.tolist()
            start = int(acts.argmax())
            rows["prompt_ids"].append(tokens[:start])
            rows["completion_ids"].append(tokens[start:])
            rows["env_mask"].append(acts[start:].astype(int).tolist())
            rows["score"].append(trajectory.reward)
        return {**rows, "logprobs": None}


class Evaluations(TrainerCallback):
    """Successes on held-out tasks, timed without themselves; ends the training at the mark."""

    def __init__(self, player: Player, mark: float) -> None:
        self.player, self.mark = player, mark
        self.left_out_s = [0.0, 0.0]  # wall, processor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began_s = [time.perf_counter(), time.process_time()]
        self._evaluate(0, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, rest = divmod(state.global_step, self.player.config.learner.minibatches)
        if rest == 0 and step % self.player.config.eval.every == 0:
            success = self._evaluate(step, kwargs["model"])
            control.should_training_stop |= success >= self.mark

    def _evaluate(self, step: int, model: Any) -> float:
        now_s = [time.perf_counter(), time.process_time()]
        wall_s, used_s = (
            now - began - out
            for now, began, out in zip(now_s, self.began_s, self.left_out_s, strict=True)
        )
        success = self.player.success(model)
        after_s = [time.perf_counter(), time.process_time()]
        self.left_out_s = [
            out + after - now
            for out, after, now in zip(self.left_out_s, after_s, now_s, strict=True)
        ]
        row = {"step": step, "success": success, "wall_s": wall_s, "used_s": used_s}
        print(json.dumps(row), flush=True)
        return success


def main() -> None:
    mark, batch = float(sys.argv[2]), int(sys.argv[3])
    whole = load(Path(sys.argv[1]), [])
    config = stage_config(whole, len(whole.stages) - 1)
    steps, learner, loss = whole.stages[-1].steps, config.learner, config.loss
    tokenizer = load_tokenizer(config.policy.path)
    player = Player(config, Chat(tokenizer))
    rows = learner.groups_per_step * config.rollout.group_size
    with tempfile.TemporaryDirectory() as directory:
        arguments = GRPOConfig(
            output_dir=directory,
            seed=config.run.seed,
            max_steps=steps * learner.minibatches,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=rows // learner.minibatches // batch,
            steps_per_generation=rows // batch,
            num_generations=config.rollout.group_size,
            learning_rate=learner.lr,
            adam_beta1=learner.betas[0],
            adam_beta2=learner.betas[1],
            adam_epsilon=learner.eps,
            max_grad_norm=learner.grad_clip,
            epsilon=loss.clip_low,
            epsilon_high=loss.clip_high,
            entropy_coef=loss.entropy_coef,
            **ON_CPU,
        )
        numbers = [str(number) for number in range(steps * learner.groups_per_step)]
        trainer = GRPOTrainer(
            model=config.policy.path,
            processing_class=tokenizer,
            reward_funcs=rewards,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": numbers}),
            rollout_func=player,
        )
        trainer.model.generation_config.stop_strings = None  # that of the exported model
        trainer.add_callback(Evaluations(player, mark))
        trainer.train()


if __name__ == "__main__":
    main()
