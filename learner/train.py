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
from evolver_async.launch.roles import RoleArgs, TrainingError, collect_rarely, weights_dir
from evolver_async.metrics import Metrics, Timers
from evolver_async.schema import Fork, Group, WeightId
from evolver_async.transport import Client, DealerClient
from evolver_async.weights.base import Publisher
from evolver_async.weights.shm import ShmPublisher
from learner.evaluations import Evaluations
from learner.outcome import NON_FINITE, Outcome
from learner.samples import write_samples
from learner.state import State
from learner.update import Updater

log = logging.getLogger(__name__)

POLL_S = 0.5  # between looks for the results of an evaluation
PATIENCE_S = 1.0  # between looks at whether to wait for the buffer any longer
LOG_S = 10.0


class Stopping(Exception):
    """This learner was told to end while it waited for the buffer."""


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
        self.evaluations = Evaluations(
            publisher,
            metrics,
            every=config.eval.every,
            episodes=config.eval.episodes,
            final_episodes=config.eval.final_episodes,
        )
        self.tokenizer = policy.load_tokenizer(config.policy.path)
        self.state = State()
        self.forks: dict[int, Fork] = {}
        self.stopping = False
        self.clock = time.perf_counter()

    def run(self) -> int:
        """Train through all stages; returns 0, also when `stopping` ended it early."""
        try:
            self.begin()
            while self.state.stage < len(self.stages):
                self.enter_stage()
                while self.step():
                    pass
            self.await_evaluations()
        except Stopping as stopping:
            log.info("told to end while it waited for %s", stopping)
        self.write()
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
        again = self.evaluations.ask_again(state)
        reply = self.request(
            messages.Resume(
                lineage=state.lineage,
                take=state.take,
                version=state.version,
                episodes=again.episodes if again else 0,
                stage=again.stage if again else 0,
            )
        )
        if reply.lineage > 1 and not resumed:
            raise checkpoint.CheckpointError(
                f"{directory}: the run has trained, no checkpoint left"
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
        with self.timers("wait"):
            groups = self.sample()
        with self.timers("train"):
            outcome = self.train(groups)
        take, stage = self.state.take, self.state.stage
        self.state.take += 1
        self.state.stage_tokens += outcome.tokens
        passed = self.tick()
        over = self.stage_over()
        # A supervised stage publishes once, at its end: nobody samples from what lies between.
        changed = over if self.kind(stage) == "sft" else outcome.updates > 0
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
            self.next_stage()
        with self.timers("report"):
            reply = self.report(take, outcome, episodes, changed)
            self.log(take, stage, outcome, reply, passed)
        self.check(stage, outcome)
        if over or self.state.take % self.config.checkpoint.every == 0:
            with self.timers("checkpoint"):
                self.save()
        return not over

    def train(self, groups: list[Group]) -> Outcome:
        """One step of the current stage's kind."""
        stage = self.stages[self.state.stage]
        steps = self.config.stages[self.state.stage].steps
        if self.kind(self.state.stage) == "sft":
            return self.updater.sft(stage, groups, self.state, steps)
        return self.updater.rl(stage, groups, self.state, self.forks, steps)

    def next_stage(self) -> None:
        """What is counted by stage begins anew."""
        state = self.state
        state.stage += 1
        state.stage_take = state.take
        state.stage_tokens = 0
        state.stage_seconds = 0.0
        state.eval_success = -1.0

    def sample(self) -> list[Group]:
        """The groups of the next take."""
        state = self.state
        request = messages.Sample(lineage=state.lineage, take=state.take, stage=state.stage)
        while isinstance(reply := self.request(request), messages.Wait):
            log.info("take %d waits: %s", state.take, reply.reason)
        return reply

    def publish(self, retain: bool) -> None:
        """Hand the policy to the weight channel under its version."""
        weights = WeightId(lineage=self.state.lineage, step=self.state.version)
        self.publisher.publish(weights, policy.state_tensors(self.updater.model), retain=retain)

    def report(self, take: int, outcome: Outcome, episodes: int, changed: bool) -> messages.Ok:
        """Tell the buffer what became of a take, and take in what it knows."""
        reply = self.request(
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
        self.evaluations.take_in(self.state, reply.evals, self.seconds())
        return reply

    def await_evaluations(self) -> None:
        """Wait for outstanding evaluations by repeating the last KEPT."""
        deadline = time.perf_counter() + self.config.eval.timeout_s
        while self.state.pending and not self.stopping:
            if time.perf_counter() > deadline:
                versions = [asked.version for asked in self.state.pending]
                log.error("evaluations of versions %s did not come", versions)
                return
            self.keep()
            self.call(asyncio.sleep(POLL_S))

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

    def check(self, index: int, outcome: Outcome) -> None:
        """Stop a run that no longer learns from anything, with the reason."""
        if self.kind(index) == "sft":
            return
        stage = self.stages[index]
        empty = not outcome.trained and NON_FINITE not in outcome.filtered
        self.state.empty_steps = self.state.empty_steps + 1 if empty else 0
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

    def log(
        self, take: int, stage: int, outcome: Outcome, reply: messages.Ok, passed: float
    ) -> None:
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
                "stage": float(stage),
                "stage_kind": self.kind(stage),
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
        self.write()
        self.keep()

    def write(self) -> None:
        checkpoint.save(
            self.run_dir / "checkpoints",
            self.state.take,
            lambda path: self.updater.save(path, self.state),
            run_id=self.run_dir.name,
            keep=self.config.checkpoint.keep,
        )

    def keep(self) -> None:
        """Say which takes the checkpoints may still ask for, and take in what evaluations found."""
        kept = checkpoint.valid(self.run_dir / "checkpoints")
        reply = self.request(messages.Kept(take=min(manifest.step for _, manifest in kept)))
        self.evaluations.take_in(self.state, reply.evals, self.seconds())

    def request(self, message: messages.Request) -> Any:
        """Send to the buffer and wait; a newer learner's existence ends this one.

        Raises Stopping where `stopping` is set and no reply comes.
        """
        if self.stopping and isinstance(message, messages.Sample):
            raise Stopping("a take")
        reply = self.call(self.reply_to(message))
        if isinstance(reply, messages.Fenced):
            raise TrainingError(f"this learner is fenced: {reply.reason}")
        return reply

    async def reply_to(self, message: messages.Request) -> Any:
        """The reply, however long it takes, until `stopping`."""
        name = type(message).__name__.upper()
        request = asyncio.ensure_future(self.client.request(message))
        waited_s = 0.0
        try:
            while not (await asyncio.wait([request], timeout=PATIENCE_S))[0]:
                if self.stopping:
                    raise Stopping(f"the reply to {name}")
                waited_s += PATIENCE_S
                if waited_s % LOG_S == 0 and not isinstance(message, messages.Sample):
                    log.warning("no reply to %s for %.0f s", name, waited_s)
            return request.result()
        finally:
            request.cancel()


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
