"""The training loop: sample, select, collate, advantage, loss, step, publish, done, checkpoint.

One SAMPLE of B groups, all its minibatches and one publish make one version. The loop keeps its
numbers in `LearnerState`; with the tensors of the models they are all that a resume needs. `step`
changes the policy, `stop_rules` reacts to alarms.
"""

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from evolver_async.buffer.tasks.data_files import DataTasks, data_tasks
from evolver_async.checkpoint.checkpoints import CheckpointError
from evolver_async.checkpoint.checkpoints import progress as writing
from evolver_async.config import Config
from evolver_async.config.sections.run import PREFERENCES
from evolver_async.errors import EVALUATION_LOST, STOPPED, TrainingError
from evolver_async.launch import run_directory
from evolver_async.launch.registry import resolve
from evolver_async.lineages import Fork
from evolver_async.metrics.activity import OTHER
from evolver_async.metrics.writer import Metrics, Timers
from evolver_async.room import await_room, lacks_room
from evolver_async.schema import Group
from evolver_async.weights.channel.interface import Publisher
from evolver_async.wire import messages
from evolver_async.wire.client import Client, Rejected
from learner.diagnostics.collapse import Alarm, forget_totals, note
from learner.diagnostics.measure import StepResult
from learner.diagnostics.step_rows import StepRows
from learner.diagnostics.stop_rules import Guard
from learner.pass_progress import StepAbandoned
from learner.ranks.mesh import Ranks
from learner.run.buffer_client import Requests, Stopping
from learner.run.checkpoint import Checkpoints
from learner.run.evaluation_tracker import EvaluationTracker, Standstill
from learner.run.rank_server import Leader
from learner.schedule import Clock, Stages, next_stage, reopen, stage_over
from learner.state import NO_EVALUATION, LearnerState
from learner.step import Updater

log = logging.getLogger(__name__)

PHASES = {  # activities in words
    "anchor": "anchor log-probs",
    "reference": "reference log-probs",
    "value": "values",
    "forward": "forward and backward",
    "backward": "forward and backward",
    "distill": "distillation",
    "teacher": "teacher",
    "validate": "validation",
    OTHER: "collation",
}
POLL_S = 0.5  # between checks for results of an evaluation, or for the end of a pause


class Learner:
    """Training loop and its parts; `call` runs a request of `client` to its reply."""

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
        self.stages = Stages(config)
        self.run_dir = run_dir
        self.requests = Requests(client, call)
        self.publisher = publisher
        self.metrics = metrics
        self.timers = Timers()
        updater = Updater(config, run_dir, self.timers, ranks)
        # Only the optimizer changes weights. Until then the copy of the published version goes on
        # beside the passes.
        updater.optimizer.register_step_pre_hook(lambda *_: self.await_copy())
        self.updater = updater if ranks is None else Leader(updater, ranks)
        self.progress = updater.ranks.progress
        self.progress.stops = lambda: self.requests.stopping
        self.evaluating = False
        self.held_out: list[Group] = []
        self.lacking = ""  # what waits for disk space
        publisher.heed(lambda: self.requests.stopping, self.tell_of_room, self.tell_of_actor)
        self.evaluations = EvaluationTracker(publisher, metrics, config.eval)
        self.checkpoints = Checkpoints(run_dir, config)
        self.guard = Guard(run_dir, metrics)
        self.rows = StepRows(config, run_dir, metrics, self.timers)
        self.state = LearnerState()
        self.forks: dict[int, Fork] = {}
        self.clock = Clock()

    def run(self) -> int:
        """Train through all stages; return 0, or STOPPED if `requests.stopping` ended it early.

        EVALUATION_LOST if training finished, but an evaluation made no progress.
        """
        code = 0
        try:
            self.begin()
            while not self.state.finished:
                self.updater.enter(self.settings, self.state)
                log.info("stage %d: %s", self.state.stage, self.kind(self.state.stage))
                self.held_out = self.rows_held_out()
                untouched = self.state.take == 0 and self.config.eval.at_start == "always"
                if untouched and (found := self.validate()):
                    self.metrics.log(0, found | {"time_s": self.clock.seconds(self.state)})
                while self.step():
                    pass
            code = self.await_evaluations()
        except Stopping as stopping:
            log.info("stopped while it waited for %s", stopping)
            code = STOPPED
        except StepAbandoned:
            log.info("stopped in step %d, which a resume repeats", self.state.take + 1)
            code = STOPPED
        try:
            self.write_checkpoint()
        except Exception as error:
            if code != STOPPED or not lacks_room(error):
                raise
            log.error("stopped without its last checkpoint: %s", error)
        self.guard.report_end(self.state, self.evaluations.newest)
        if isinstance(self.updater, Leader):
            self.updater.end()
        return code

    def close(self) -> None:
        """Close the weight channel and the metric sinks."""
        self.publisher.close()
        self.metrics.close()

    def begin(self) -> None:
        """Restore the newest checkpoint, ask for a lineage, and publish under it."""
        newest = self.checkpoints.newest()
        if newest is not None:
            self.await_copy()
            self.state = self.updater.restore(newest)
            log.info("resumed from %s", newest)
        state = self.state
        first = self.stages(0).eval
        if newest is None and self.config.eval.at_start == "always" and first.episodes:
            self.evaluations.ask(state, 0, first.episodes, first.sets)
        elif newest is not None and (known := self.checkpoints.untouched(newest)):
            self.evaluations.know(state, known)
        reopen(self.config.stages, state)
        again = self.evaluations.ask_again(state, self.stages) or NO_EVALUATION
        request = messages.Resume(
            lineage=state.lineage,
            take=state.take,
            version=state.version,
            episodes=again.episodes,
            sets=again.sets,
            eval_stage=again.stage,
            stage=state.stage,
            discard=state.discard,
            process=secrets.token_hex(8),  # the same in a repeated request
            incarnation=self.requests.client.incarnation,
        )
        try:
            reply = self.requests.ask(request)
        except Rejected as error:
            found = newest or f"{self.checkpoints.directory}: no checkpoint left"
            raise CheckpointError(f"{found}: the buffer refused it: {error}") from error
        state.lineage, state.discard = reply.lineage, False
        self.metrics.lineage, self.metrics.progress = reply.lineage, state.progress()
        self.forks = {fork.lineage: fork for fork in reply.forks}
        self.publish(retain=again is not NO_EVALUATION)
        self.publisher.wait()
        self.save()

    def beat(self) -> messages.Beat:
        """Report the progress of the present step; called by another thread than the training."""
        activity, progress = self.timers.clock.activity, self.progress
        count = self.timers.clock.changes + progress.micro_batches
        if activity == "checkpoint":  # its bytes can take long, and no processor
            count += hash(writing(self.checkpoints.directory)) % (1 << 32)
        if self.lacking:  # it does not hang
            count += int(time.monotonic())
        phase = f"wait for disk space: {self.lacking}" if self.lacking else ""
        phase = phase or PHASES.get(activity, activity)
        if activity == OTHER and progress.began is None:
            phase = "evaluation" if self.evaluating else "start"
        return messages.Beat(
            role="learner",
            phase=phase,
            count=count,
            step=progress.step + 1,
            step_s=progress.seconds,
            left_s=progress.left_s,
            share=progress.share,
            micro_batches=progress.micro_batches,
            tokens=progress.tokens,
        )

    @property
    def settings(self) -> Config:
        """Configuration of the present stage after its rollbacks."""
        return self.stages(self.state.stage, self.state.rollbacks)

    def kind(self, stage: int) -> str:
        return self.config.stages[stage].kind

    def step(self) -> bool:
        """Train on one take, publish, report, log, save; return True while the stage goes on."""
        self.heed_pause()
        take, stage, kind = self.state.take, self.state.stage, self.kind(self.state.stage)
        settings = self.settings
        with self.timers("wait"):
            groups = self.sample()
        self.progress.begin(self.state.take)
        with self.timers("train"):
            steps = self.config.stages[stage].steps
            outcome = self.updater.step(kind, settings, groups, self.state, self.forks, steps)
        self.progress.end()
        learns = kind == "rl"
        selects = kind in ("rl", *PREFERENCES)  # those can filter all groups
        self.guard.count(settings, self.state, outcome)
        alarms = self.guard.watch(settings, self.state, outcome) if learns else []
        self.state.count(groups, outcome.tokens, outcome.updates)
        passed = self.clock.tick(self.state)
        self.guard.tell_slow_rank(take, outcome.metrics, passed)
        over = stage_over(self.config.stages[stage], self.state)
        every = settings.eval.every
        if over or (every and not self.state.stage_step % every):
            outcome.metrics.update(self.validate())
        if over and kind == "reward_model":  # before any actor can get a ticket of the next stage
            self.updater.export_reward_model(run_directory.reward_model_of(self.run_dir, stage))
        # Other stages publish at their end (and at a restart): no version is made in between.
        changed = outcome.updates > 0 if learns else over
        if changed:
            self.state.version += 1
        last = stage == len(self.config.stages) - 1
        episodes = self.evaluations.due(self.state.version, over=over, changed=changed)
        if changed or episodes:  # a second evaluation needs retained weights, too
            with self.timers("publish"):
                self.publish(retain=episodes > 0)
        if self.config.launch.kind == "serial":
            self.publisher.wait()
        if episodes:
            sets, end = settings.eval.sets, over and last
            self.evaluations.ask(self.state, stage, episodes, sets, over=over, end=end)
        alarmed = replace(self.state)  # from here on it is the next step's: `report` may stop
        if over and last:
            self.state.finished = True
        elif over:
            next_stage(self.state)
        with self.timers("report"):
            reply = self.report(take, outcome, episodes, changed)
            note(self.state.watched, reply.counters)
            self.state.count_explorations(reply.counters)
            seconds = self.clock.seconds(self.state)
            self.rows.write(self.state, take, stage, outcome, reply.counters, seconds, passed)
        if selects:
            self.guard.check(settings, self.state, outcome)
        if alarms and settings.safety.action == "rollback":
            self.roll_back(settings, alarmed, alarms)
            return False
        due = over or self.checkpoints.due(self.state.take, episodes > 0)
        if due or (alarms and settings.safety.action != "warn") or reply.checkpoint:
            with self.timers("checkpoint"):
                self.save()
        return not over

    def roll_back(self, stage: Config, alarmed: LearnerState, alarms: list[Alarm]) -> None:
        """Continue from before the alarms with the changes of `safety`, or raise TrainingError.

        `alarmed`: the state in the stage that raised them, which that step can have ended.
        """
        self.guard.allow_rollback(stage, alarmed, alarms)
        self.checkpoints.go_back(alarmed, max(alarm.steps for alarm in alarms))
        self.evaluations.abandon(self.state)
        self.begin()
        forget_totals(self.state.watched)  # what was counted in the steps that are left counts on

    def rows_held_out(self) -> list[Group]:
        """Return the rows that the present stage is measured on and never trains, as groups."""
        settings, stage = self.settings, self.state.stage
        if self.kind(stage) == "rl" or not settings.data.path or not settings.eval.rows:
            return []
        tasks = data_tasks(settings.data, settings.env.name, settings.env.params)
        if not isinstance(tasks, DataTasks) or not tasks.count("validation"):
            return []
        return resolve("held_out")(tasks, settings, stage, self.kind(stage))

    def validate(self) -> dict[str, float]:
        """Measure the present weights on the rows held out of the stage; {} without such rows."""
        if not self.held_out:
            return {}
        with self.timers("validate"):
            kind = self.kind(self.state.stage)
            return self.updater.validate(kind, self.settings, self.held_out, self.state)

    def heed_pause(self) -> None:
        """Wait while the run is paused; report the pause and log results of evaluations."""
        notice = run_directory.pause_notice(self.run_dir)
        if notice is None:
            return
        if self.config.launch.kind == "serial":  # a pause cannot end in virtual time
            raise TrainingError(f"paused: {notice}, then train --resume {self.run_dir}")
        log.warning("paused: %s", notice)
        self.clock.count(self.state)
        while notice := run_directory.pause_notice(self.run_dir):
            if self.requests.stopping:
                raise Stopping("the end of its pause")
            self.keep(paused=notice)
            self.requests.sleep(POLL_S)
            self.clock.skip()
        self.keep()
        self.timers.clock.skip()
        log.info("continued after its pause")

    def sample(self) -> list[Group]:
        """Return the groups of the next take; TrainingError if there will be none."""
        state = self.state
        request = messages.Sample(lineage=state.lineage, take=state.take, stage=state.stage)
        try:
            while isinstance(reply := self.requests.ask(request), messages.Wait):
                log.info("take %d waits: %s", state.take, reply.reason)
                seconds = self.clock.seconds(state)
                self.guard.report_failures(reply.failures, state.take, seconds)
        except Rejected as error:
            raise TrainingError(f"take {state.take}: {error}") from error
        return reply

    def publish(self, retain: bool) -> None:
        """Publish the policy under its version."""
        try:
            self.publisher.publish(self.state.head, self.updater.published(), retain=retain)
        except OSError as error:
            if self.requests.stopping and lacks_room(error):
                raise Stopping("disk space for its weights") from error
            raise

    def tell_of_room(self, text: str) -> None:
        """Note a wait for disk space, and alert of it; "": its end."""
        self.lacking = text
        if text:
            self.metrics.alert("disk full", text, "ERROR", console=True)

    def tell_of_actor(self, text: str) -> None:
        """Alert of an actor that gets no weights; called by the thread that publishes."""
        self.metrics.alert("actor without weights", text, "WARN", console=True)

    def await_copy(self) -> None:
        """Wait until the weights may change: a version is copied beside the step after it."""
        with self.timers("publish"):
            self.publisher.copied()

    def report(self, take: int, outcome: StepResult, episodes: int, changed: bool) -> messages.Ok:
        """Report the result of a take to the buffer, and log the news of its reply."""
        reply = self.requests.ask(
            messages.Done(
                lineage=self.state.lineage,
                take=take,
                version=self.state.version,
                trained=outcome.trained,
                filtered=outcome.filtered,
                skipped=not changed,
                episodes=episodes,
                sets=self.state.pending[-1].sets if episodes else [],
            )
        )
        self.take_in(reply)
        self.guard.report_failures(reply.failures, take, self.clock.seconds(self.state))
        return reply

    def take_in(self, reply: messages.Ok) -> None:
        """Log results of evaluations, and note them beside the checkpoints of these weights."""
        seconds = self.clock.seconds(self.state)
        for result, asked in self.evaluations.take_in(self.state, reply.evals, seconds):
            self.checkpoints.evaluated(result, asked)

    def await_evaluations(self) -> int:
        """Repeat KEPT until all evaluations end or make no progress; return the exit code."""
        timeout_s = self.config.eval.timeout_s
        self.evaluating = True
        standstill = Standstill(timeout_s, self.requests.now())
        while self.state.pending and not self.requests.stopping:
            progress = self.keep()
            if self.state.pending and standstill.reached(progress, self.requests.now()):
                self.evaluations.report_lost(self.state, timeout_s, self.run_dir)
                return EVALUATION_LOST
            self.requests.sleep(POLL_S)
        return STOPPED if self.state.pending else 0

    def save(self) -> None:
        """Write a checkpoint, drop old ones, and tell the buffer the oldest take still needed."""
        self.write_checkpoint()
        self.keep()

    def write_checkpoint(self) -> None:
        self.clock.count(self.state)
        await_room(
            lambda: self.checkpoints.write(
                self.state, lambda path: self.updater.save(path, self.state)
            ),
            "a checkpoint",
            stops=lambda: self.requests.stopping,
            tell=self.tell_of_room,
        )

    def keep(self, paused: str = "") -> dict[int, int]:
        """Report the oldest take that checkpoints can ask for; log results of evaluations.

        Return the progress of the tickets that outstanding evaluations need, by group.
        """
        oldest, size = self.checkpoints.kept()
        reply = self.requests.ask(messages.Kept(take=oldest, bytes=size, paused=paused))
        self.take_in(reply)
        return reply.evaluating
