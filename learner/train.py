"""The training loop: sample, select, collate, advantage, loss, step, publish, done, checkpoint.

One SAMPLE of B groups, all its minibatches and one publish make one version. All that the loop
knows is in `State` and in the tensors beside it: a checkpoint is everything there is to resume
from. What a step does to the policy is in `update`, what an alarm leads to in `guard`.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evolver_async import messages, policy
from evolver_async.checkpoint import CheckpointError
from evolver_async.config import Config
from evolver_async.config.load import load, to_dict
from evolver_async.launch import directory
from evolver_async.launch.roles import RoleArgs, TrainingError, collect_rarely, weights_address
from evolver_async.metrics import Metrics, Timers
from evolver_async.schema import Fork, Group, WeightId
from evolver_async.transport import Client, DealerClient, Rejected
from evolver_async.weights import load as channel
from evolver_async.weights.base import Publisher
from learner.checkpoints import Checkpoints
from learner.evaluations import Evaluations
from learner.follow import Leader, attend, meeting
from learner.guard import Guard
from learner.outcome import Outcome
from learner.parallel import Ranks
from learner.progress import Clock, next_stage, stage_over
from learner.requests import Requests, Stopping
from learner.samples import write_samples
from learner.state import State
from learner.supervised import scored_stages
from learner.update import Updater

log = logging.getLogger(__name__)

POLL_S = 0.5  # between looks for the results of an evaluation, or for the end of a pause


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
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self.stages = scored_stages(config)
        self.run_dir = run_dir
        self.requests = Requests(client, call)
        self.publisher = publisher
        self.metrics = metrics
        self.timers = Timers()
        updater = Updater(config, run_dir, self.timers, ranks)
        self.updater = updater if ranks is None else Leader(updater, ranks)
        self.evaluations = Evaluations(
            publisher,
            metrics,
            every=config.eval.every,
            episodes=config.eval.episodes,
            final_episodes=config.eval.final_episodes,
        )
        self.checkpoints = Checkpoints(run_dir, config.checkpoint.keep)
        self.guard = Guard(run_dir, metrics)
        self.tokenizer = policy.load_tokenizer(config.policy.path)
        self.state = State()
        self.forks: dict[int, Fork] = {}
        self.clock = Clock()

    def run(self) -> int:
        """Train through all stages; returns 0, also when `requests.stopping` ended it early."""
        try:
            self.begin()
            while self.state.stage < len(self.stages):
                self.enter_stage()
                while self.step():
                    pass
            self.await_evaluations()
        except Stopping as stopping:
            log.info("told to end while it waited for %s", stopping)
        self.write_checkpoint()
        if isinstance(self.updater, Leader):
            self.updater.end()
        return 0

    def close(self) -> None:
        """Let go of the weight channel and the metric sinks."""
        self.publisher.close()
        self.metrics.close()

    def begin(self) -> None:
        """Restore the newest checkpoint, ask for a lineage, publish under it."""
        newest = self.checkpoints.newest()
        if newest is not None:
            self.state = self.updater.restore(newest)
            log.info("resumed from %s", newest)
        state = self.state
        again = self.evaluations.ask_again(state)
        reply = self.requests.ask(
            messages.Resume(
                lineage=state.lineage,
                take=state.take,
                version=state.version,
                episodes=again.episodes if again else 0,
                stage=again.stage if again else 0,
            )
        )
        if reply.lineage > 1 and newest is None:
            raise CheckpointError(
                f"{self.checkpoints.directory}: the run has trained, no checkpoint left"
            )
        state.lineage = reply.lineage
        self.forks = {fork.lineage: fork for fork in reply.forks}
        self.publish(retain=again is not None)
        self.publisher.wait()
        self.save()

    def enter_stage(self) -> None:
        """Carry out a stage's beginning once, and what every start within it needs."""
        index = self.state.stage
        if self.state.entered < index:
            self.updater.begin_stage(self.stages[index], index)
            self.state.entered = index
        self.updater.ensure_reference(self.stages[index], index)
        log.info("stage %d: %s", index, self.kind(index))

    def kind(self, stage: int) -> str:
        return self.config.stages[stage].kind

    def step(self) -> bool:
        """One take: train on it, publish, report, log, save. Returns whether the stage goes on."""
        self.heed_pause()
        with self.timers("wait"):
            groups = self.sample()
        with self.timers("train"):
            outcome = self.train(groups)
        take, stage = self.state.take, self.state.stage
        learns = self.kind(stage) == "rl"
        selects = learns or self.kind(stage) == "dpo"  # so that it may be left with nothing
        if selects:
            self.guard.count(self.stages[stage], self.state, outcome)
        alarmed = learns and self.guard.watch(self.stages[stage], self.state, groups, outcome)
        self.state.take += 1
        self.state.stage_tokens += outcome.tokens
        passed = self.clock.tick(self.state)
        over = stage_over(self.config.stages[stage], self.state)
        # Other stages publish once, at their end: nobody samples from what lies between.
        changed = outcome.updates > 0 if learns else over
        if changed:
            self.state.version += 1
        last = stage == len(self.stages) - 1
        episodes = self.evaluations.due(self.state.version, over=over, last=last, changed=changed)
        if changed or episodes:  # what is evaluated a second time must be retained as well
            with self.timers("publish"):
                self.publish(retain=episodes > 0)
        if self.config.launch.kind == "serial":
            self.publisher.wait()
        # From here on the state is that of the next step: `report` may end in `Stopping`.
        if episodes:
            self.evaluations.ask(self.state, stage, episodes)
        if over:
            next_stage(self.state)
        with self.timers("report"):
            reply = self.report(take, outcome, episodes, changed)
            self.log(take, stage, outcome, reply, passed)
        if selects:
            self.guard.check(self.stages[stage], self.state, outcome)
        due = over or self.state.take % self.config.checkpoint.every == 0
        if due or alarmed or reply.checkpoint:
            with self.timers("checkpoint"):
                self.save()
        return not over

    def train(self, groups: list[Group]) -> Outcome:
        """One step of the current stage's kind."""
        stage, kind = self.stages[self.state.stage], self.kind(self.state.stage)
        steps = self.config.stages[self.state.stage].steps
        if kind == "rl":
            return self.updater.rl(stage, groups, self.state, self.forks, steps)
        if kind == "dpo":
            return self.updater.dpo(stage, groups, self.state, self.forks, steps)
        return self.updater.sft(stage, groups, self.state, steps)

    def heed_pause(self) -> None:
        """While the run is paused take nothing; only say so, and take in what evaluations find."""
        reason = directory.pause_reason(self.run_dir)
        if reason is None:
            return
        pause = f"paused: {reason}; to go on: evolver-async unpause {self.run_dir}"
        if self.config.launch.kind == "serial":  # nobody could end a pause in virtual time
            raise TrainingError(f"{pause}, then train --resume {self.run_dir}")
        log.warning("%s", pause)
        while reason := directory.pause_reason(self.run_dir):
            if self.requests.stopping:
                raise Stopping("the end of its pause")
            self.keep(paused=reason)
            self.requests.sleep(POLL_S)
        self.keep()
        self.clock.skip()
        log.info("goes on after its pause")

    def sample(self) -> list[Group]:
        """The groups of the next take. TrainingError where there will be none."""
        state = self.state
        request = messages.Sample(lineage=state.lineage, take=state.take, stage=state.stage)
        try:
            while isinstance(reply := self.requests.ask(request), messages.Wait):
                log.info("take %d waits: %s", state.take, reply.reason)
                self.guard.tell_failures(reply.failures, state.take)
        except Rejected as error:
            raise TrainingError(f"take {state.take}: {error}") from error
        return reply

    def publish(self, retain: bool) -> None:
        """Hand the policy to the weight channel under its version."""
        weights = WeightId(lineage=self.state.lineage, step=self.state.version)
        self.publisher.publish(weights, self.updater.published(), retain=retain)

    def report(self, take: int, outcome: Outcome, episodes: int, changed: bool) -> messages.Ok:
        """Tell the buffer what became of a take, and take in what it knows."""
        reply = self.requests.ask(
            messages.Done(
                lineage=self.state.lineage,
                take=take,
                version=self.state.version,
                trained=outcome.trained,
                filtered=outcome.filtered,
                skipped=not changed,
                episodes=episodes,
            )
        )
        self.evaluations.take_in(self.state, reply.evals, self.clock.seconds(self.state))
        self.guard.tell_failures(reply.failures, take)
        return reply

    def await_evaluations(self) -> None:
        """Wait for outstanding evaluations by repeating the last KEPT."""
        deadline = time.perf_counter() + self.config.eval.timeout_s
        while self.state.pending and not self.requests.stopping:
            if time.perf_counter() > deadline:
                versions = [asked.version for asked in self.state.pending]
                log.error("evaluations of versions %s did not come", versions)
                return
            self.keep()
            self.requests.sleep(POLL_S)

    def log(
        self, take: int, stage: int, outcome: Outcome, reply: messages.Ok, passed: float
    ) -> None:
        """One row of metrics a step, now and then a few trajectories.

        `passed`: seconds since the step before was done. Times of reporting and of checkpoints,
        which end after their row, are in the next one.
        """
        times = self.timers.drain()
        self.metrics.log(
            self.state.take,
            {
                "time_s": self.clock.seconds(self.state),
                "stage": float(stage),
                "stage_kind": self.kind(stage),
                "version": float(self.state.version),
                **outcome.metrics,
                **reply.counters,
                **times,
                "weights/publish_s": times.get("time/publish_s", 0.0),
                **outcome.rates(passed),
            },
        )
        metrics = self.config.metrics
        if outcome.batch is not None and metrics.samples and take % metrics.samples_every == 0:
            path = self.run_dir / "samples" / f"step_{self.state.take:06d}.jsonl"
            write_samples(path, self.tokenizer, outcome.groups, outcome.batch, metrics.samples)

    def save(self) -> None:
        """Write a checkpoint, drop old ones, and let the journal go as far as they allow."""
        self.write_checkpoint()
        self.keep()

    def write_checkpoint(self) -> None:
        state = self.state
        self.checkpoints.write(state.take, lambda path: self.updater.save(path, state))

    def keep(self, paused: str = "") -> None:
        """Say which takes the checkpoints may still ask for, and take in what evaluations found."""
        oldest, size = self.checkpoints.kept()
        reply = self.requests.ask(messages.Kept(take=oldest, bytes=size, paused=paused))
        self.evaluations.take_in(self.state, reply.evals, self.clock.seconds(self.state))


def build(
    config: Config,
    run_dir: Path,
    client: Client,
    call: Callable[..., Any],
    ranks: Ranks | None = None,
) -> Learner:
    """A learner for any launcher, of several ranks the first; writes metrics and weights."""
    torch.set_num_threads(config.learner.threads)
    serial = config.launch.kind == "serial"
    publisher = channel.publisher(config, weights_address(config, run_dir), background=not serial)
    metrics = Metrics(
        run_dir,
        wandb=config.metrics.wandb,
        project=config.metrics.project,
        name=run_dir.name,
        config=to_dict(config),
    )
    return Learner(config, run_dir, client, call, publisher, metrics, ranks)


def main(args: RoleArgs) -> int:
    """Role `learner`: connect to the buffer, train, leave; or take part in that as a rank."""
    config = load(args.run_dir / "config.yaml", [])
    torch.set_num_threads(config.learner.threads)
    with meeting(config, args) as ranks:
        if ranks is not None and ranks.rank > 0:
            return attend(config, args.run_dir, ranks)
        return lead(config, args, ranks)


def lead(config: Config, args: RoleArgs, ranks: Ranks | None) -> int:
    """Be the only rank, or the first of several: the one that talks to the buffer."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def connect() -> DealerClient:
        run_id = args.run_dir.name
        return DealerClient(args.address, run_id, args.name, args.incarnation, keys=args.keys)

    client = loop.run_until_complete(connect())
    learner = build(config, args.run_dir, client, loop.run_until_complete, ranks)
    collect_rarely()

    def stop(*_: object) -> None:
        learner.requests.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        return learner.run()
    finally:
        learner.close()
        client.close()
        loop.close()
