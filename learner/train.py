"""The training loop: sample, select, collate, advantage, loss, step, publish, done, checkpoint.

One SAMPLE of B groups, all its minibatches and one publish make one version. All that the loop
knows is in `State` and in the tensors beside it: a checkpoint is everything there is to resume
from.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evolver_async import checkpoint, messages, policy
from evolver_async.config import Config
from evolver_async.config.load import load, stage_config, to_dict
from evolver_async.launch.roles import RoleArgs, collect_rarely, weights_dir
from evolver_async.metrics import Metrics, Timers
from evolver_async.schema import Fork, Group, WeightId
from evolver_async.transport import Client, DealerClient
from evolver_async.weights.base import Publisher
from evolver_async.weights.shm import ShmPublisher
from learner.samples import write_samples
from learner.state import State
from learner.update import Outcome, TrainingError, Updater

log = logging.getLogger(__name__)

POLL_S = 0.5  # between looks for the results of an evaluation


class Learner:
    """The loop and what it needs; `call` runs a request of `client` to its reply."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        client: Client,
        call: Callable[..., Any],
        publisher: Publisher,
        metrics: Metrics,
    ) -> None:
        self.config = config
        self.stages = [stage_config(config, index) for index in range(len(config.stages))]
        self.run_dir = run_dir
        self.client = client
        self.call = call
        self.publisher = publisher
        self.metrics = metrics
        self.timers = Timers()
        self.updater = Updater(config, run_dir, self.timers)
        self.tokenizer = policy.load_tokenizer(config.policy.path)
        self.state = State()
        self.forks: dict[int, Fork] = {}
        self.stopping = False
        self.clock = time.perf_counter()

    def run(self) -> int:
        """Train through all stages; returns 0, also when `stopping` ended it early."""
        self.begin()
        while self.state.stage < len(self.stages) and not self.stopping:
            self.enter_stage()
            while not self.stopping and self.step():
                pass
        if not self.stopping:
            self.await_evaluations()
        self.save()
        return 0

    def close(self) -> None:
        """Let go of the weight channel and the metric sinks."""
        self.publisher.close()
        self.metrics.close()

    def begin(self) -> None:
        """Restore the newest checkpoint, ask for a lineage, publish under it."""
        directory = self.run_dir / "checkpoints"
        resumed = checkpoint.exists(directory)
        if resumed:
            newest, _ = checkpoint.load_newest(directory, self.run_dir.name)
            self.state = self.updater.restore(newest)
            log.info("resumed from %s", newest)
        state = self.state
        reply = self.request(
            messages.Resume(lineage=state.lineage, take=state.take, version=state.version)
        )
        if reply.lineage > 1 and not resumed:
            raise checkpoint.CheckpointError(
                f"{directory}: the run has trained, no checkpoint left"
            )
        state.lineage = reply.lineage
        self.forks = {fork.lineage: fork for fork in reply.forks}
        self.publish(retain=False)
        self.publisher.wait()
        self.save()

    def enter_stage(self) -> None:
        """Carry out a stage's beginning, once."""
        if self.state.entered < self.state.stage:
            self.updater.enter_stage(self.stages[self.state.stage], self.state.stage)
            self.state.entered = self.state.stage
        log.info("stage %d: %s", self.state.stage, self.kind())

    def kind(self) -> str:
        return self.config.stages[self.state.stage].kind

    def step(self) -> bool:
        """One take: train on it, publish, report, log, save. Returns whether the stage goes on."""
        with self.timers("wait"):
            groups = self.sample()
        if groups is None:
            return True
        with self.timers("train"):
            outcome = self.train(groups)
        take = self.state.take
        self.state.take += 1
        self.state.stage_tokens += outcome.tokens
        passed = self.tick()
        self.state.empty_steps = 0 if outcome.trained else self.state.empty_steps + 1
        over = self.stage_over()
        # A supervised stage publishes once, at its end: nobody samples from what lies between.
        changed = over if self.kind() == "sft" else outcome.updates > 0
        if changed:
            self.state.version += 1
        episodes = self.episodes_due(over, changed)
        if changed:
            with self.timers("publish"):
                self.publish(retain=episodes > 0)
        if self.config.launch.kind == "serial":
            self.publisher.wait()
        with self.timers("report"):
            reply = self.report(take, outcome, episodes, changed)
            self.log(take, outcome, reply, passed)
        self.check(outcome)
        if over:
            self.state.stage += 1
            self.state.stage_take = self.state.take
            self.state.stage_tokens = 0
            self.state.stage_seconds = 0.0
        if over or self.state.take % self.config.checkpoint.every == 0:
            with self.timers("checkpoint"):
                self.save()
        return not over

    def train(self, groups: list[Group]) -> Outcome:
        """One step of the current stage's kind."""
        stage = self.stages[self.state.stage]
        steps = self.config.stages[self.state.stage].steps
        if self.kind() == "sft":
            return self.updater.sft(stage, groups, self.state, steps)
        return self.updater.rl(stage, groups, self.state, self.forks, steps)

    def sample(self) -> list[Group] | None:
        """The groups of the next take; None when asked to stop meanwhile."""
        state = self.state
        request = messages.Sample(lineage=state.lineage, take=state.take, stage=state.stage)
        while not self.stopping:
            reply = self.request(request)
            if not isinstance(reply, messages.Wait):
                return reply
            log.info("take %d waits: %s", state.take, reply.reason)
        return None

    def publish(self, retain: bool) -> None:
        """Hand the policy to the weight channel under its version."""
        weights = WeightId(lineage=self.state.lineage, step=self.state.version)
        self.publisher.publish(weights, policy.state_tensors(self.updater.model), retain=retain)

    def report(self, take: int, outcome: Outcome, episodes: int, changed: bool) -> messages.Ok:
        """Tell the buffer what became of a take, and take in what it knows."""
        self.done = messages.Done(
            lineage=self.state.lineage,
            take=take,
            version=self.state.version,
            trained=outcome.trained,
            filtered=outcome.filtered,
            skipped=not changed,
            episodes=episodes,
        )
        if episodes:
            self.state.pending.append(self.state.version)
        reply = self.request(self.done)
        self.take_in(reply)
        return reply

    def take_in(self, reply: messages.Ok) -> None:
        """Log evaluation results, each once; their weights are no longer needed."""
        for result in reply.evals:
            if result.weights.step not in self.state.pending:
                continue  # results are repeated until the next take is done
            self.state.pending.remove(result.weights.step)
            self.publisher.release(result.weights)
            self.state.eval_success = result.success
            values = {
                "eval/success": result.success,
                "eval/reward_mean": result.reward_mean,
                "eval/turns_mean": result.turns_mean,
                "eval/episodes": float(result.episodes),
                "eval/version": float(result.weights.step),
                "time_s": self.seconds(),
            }
            self.metrics.log(result.step + 1, values)

    def await_evaluations(self) -> None:
        """Wait for outstanding evaluations by repeating the last DONE."""
        deadline = time.perf_counter() + self.config.eval.timeout_s
        while self.state.pending and not self.stopping:
            if time.perf_counter() > deadline:
                log.error("evaluations of versions %s did not come", self.state.pending)
                return
            self.take_in(self.request(self.done))
            self.call(asyncio.sleep(POLL_S))

    def episodes_due(self, over: bool, changed: bool) -> int:
        """Evaluation episodes to ask for after this step."""
        evaluation = self.config.eval
        if over and self.state.stage == len(self.stages) - 1:
            return evaluation.final_episodes
        due = evaluation.every > 0 and changed and self.state.version % evaluation.every == 0
        return evaluation.episodes if over or due else 0

    def stage_over(self) -> bool:
        """Whether the first of the stage's limits is reached."""
        stage, state = self.config.stages[self.state.stage], self.state
        return (
            0 < stage.steps <= state.take - state.stage_take
            or 0 < stage.tokens <= state.stage_tokens
            or 0 < stage.hours * 3600 <= state.stage_seconds
            or 0 < stage.until_success <= state.eval_success
        )

    def tick(self) -> float:
        """Seconds since the last call; adds them to the run's and to the stage's."""
        now = time.perf_counter()
        passed, self.clock = now - self.clock, now
        self.state.seconds += passed
        self.state.stage_seconds += passed
        return passed

    def seconds(self) -> float:
        return self.state.seconds + time.perf_counter() - self.clock

    def check(self, outcome: Outcome) -> None:
        """Stop a run that no longer learns from anything, with the reason."""
        if self.kind() == "sft":
            return
        stage = self.stages[self.state.stage]
        if self.state.empty_steps >= stage.selection.max_empty:
            raise TrainingError(
                f"{self.state.empty_steps} steps in a row had nothing to train on"
                f" ({', '.join(outcome.filtered) or 'no ACTION tokens'})"
            )
        masked = outcome.metrics.get("offpolicy/masked", 0.0)
        self.state.masked_steps = (
            self.state.masked_steps + 1 if masked > stage.correction.max_masked else 0
        )
        if self.state.masked_steps:
            log.warning("%.0f %% of the tokens are masked", 100 * masked)
        if self.state.masked_steps >= 5:
            raise TrainingError(f"five steps in a row had {masked:.0%} of their tokens masked")

    def log(self, take: int, outcome: Outcome, reply: messages.Ok, passed: float) -> None:
        """One row of metrics a step, now and then a few trajectories.

        `passed`: seconds since the step before was done. Times of reporting and of checkpoints,
        which end after their row, are in the next one.
        """
        times = self.timers.drain()
        groups = len(outcome.trained) + sum(len(ids) for ids in outcome.filtered.values())
        self.metrics.log(
            self.state.take,
            {
                "time_s": self.seconds(),
                "stage": float(self.state.stage),
                "stage_kind": self.kind(),
                "version": float(self.state.version),
                **outcome.metrics,
                **reply.counters,
                **times,
                "weights/publish_s": times.get("time/publish_s", 0.0),
                "throughput/tokens_per_s": outcome.tokens / passed,
                "throughput/groups_per_s": groups / passed,
            },
        )
        metrics = self.config.metrics
        if outcome.batch is not None and metrics.samples and take % metrics.samples_every == 0:
            path = self.run_dir / "samples" / f"step_{self.state.take:06d}.jsonl"
            write_samples(path, self.tokenizer, outcome.groups, outcome.batch, metrics.samples)

    def save(self) -> None:
        """Write a checkpoint, drop old ones, and let the journal go as far as they allow."""
        directory = self.run_dir / "checkpoints"
        checkpoint.save(
            directory,
            self.state.take,
            lambda path: self.updater.save(path, self.state),
            run_id=self.run_dir.name,
            keep=self.config.checkpoint.keep,
            extra={"take": self.state.take},
        )
        oldest = min(manifest.step for _, manifest in checkpoint.valid(directory))
        self.request(messages.Kept(take=oldest))

    def request(self, message: messages.Request) -> Any:
        """Send to the buffer and wait; a newer learner's existence ends this one."""
        reply = self.call(self.client.request(message))
        if isinstance(reply, messages.Fenced):
            raise TrainingError(f"this learner is fenced: {reply.reason}")
        return reply


def build(config: Config, run_dir: Path, client: Client, call: Callable[..., Any]) -> Learner:
    """A learner for any launcher; writes metrics and weights, reads checkpoints."""
    torch.set_num_threads(config.learner.threads)
    serial = config.launch.kind == "serial"
    publisher = ShmPublisher(
        weights_dir(config, run_dir),
        keep=max(2, 1 + config.actors.weight_lag),
        background=not serial,
    )
    metrics = Metrics(
        run_dir,
        wandb=config.metrics.wandb,
        project=config.metrics.project,
        name=run_dir.name,
        config=to_dict(config),
    )
    return Learner(config, run_dir, client, call, publisher, metrics)


def main(args: RoleArgs) -> int:
    """Role `learner`: connect to the buffer, train, leave."""
    config = load(args.run_dir / "config.yaml", [])
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def connect() -> DealerClient:
        return DealerClient(args.address, args.run_dir.name, args.name, args.incarnation)

    client = loop.run_until_complete(connect())
    learner = build(config, args.run_dir, client, loop.run_until_complete)
    collect_rarely()

    def stop(*_: object) -> None:
        learner.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        return learner.run()
    finally:
        learner.close()
        client.close()
        loop.close()
