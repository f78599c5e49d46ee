"""The learner's steps over recorded takes, in one process.

A step is a function of the learner's state and of the groups of its take. So are its weights and
metrics: no buffer, actor or published version takes part. Nothing is written but what `directory`
gets: batches of non-finite steps, and what the caller saves.
"""

from dataclasses import replace
from pathlib import Path

from evolver_async.config import Config
from evolver_async.config.sections.run import PREFERENCES
from evolver_async.metrics.writer import Metrics, Timers
from evolver_async.schema import Group
from evolver_async.study.rerun import RerunPlan
from learner.diagnostics.collapse import forget_totals
from learner.diagnostics.measure import StepResult
from learner.diagnostics.stop_rules import Guard
from learner.schedule import Stages, next_stage, stage_over
from learner.state import LearnerState
from learner.step import Updater

# Alarms about totals that the actors report, which a rerun has none of.
REPORTED = ("alarm/judge", "alarm/judge_praise", "alarm/weights")


class Retrainer:
    """Learner of a plan's takes under `config`; its state is that before the next take."""

    def __init__(self, made: RerunPlan, config: Config, directory: Path, start: Path | None):
        self.made = made
        self.config = config
        self.stages = Stages(config)
        self.timers = Timers()
        self.metrics = Metrics(directory)
        self.guard = Guard(directory, self.metrics)
        self.updater = Updater(config, directory, self.timers)
        self.state = LearnerState() if start is None else self.updater.restore(start)
        self.state.finished = False  # of a checkpoint at the end of a run that was extended
        self._enters_next()

    def enter(self) -> None:
        """Carry out the beginning of the next take's stage."""
        settings = self.stages(self.state.stage, self.state.rollbacks)
        self.updater.enter(settings, self.state)

    def step(self) -> tuple[StepResult, list[Group]]:
        """Train the next take; return the result, alarms included, and the groups of the take."""
        state, number = self.state, self.state.take
        taken, written = self.made.line[number], self.config.stages[self.state.stage]
        state.lineage, state.rollbacks = taken.lineage, self.made.rollbacks(number)
        self.enter()
        settings, groups = self.stages(state.stage, state.rollbacks), self.made.takes.groups(number)
        with self.timers("train"):
            forks = self.made.results.history.forks
            outcome = self.updater.step(written.kind, settings, groups, state, forks, written.steps)
        learns = written.kind == "rl"
        self.guard.count(settings, state, outcome)
        if learns:
            # The reactions of the run are part of its takes; here alarms are only measured.
            measures = replace(settings, safety=replace(settings.safety, action="warn"))
            forget_totals(state.watched)  # reports of the actors are not repeated
            self.guard.watch(measures, state, outcome)
            for name in REPORTED:
                outcome.metrics.pop(name, None)
            if settings.safety.action == "rollback":
                outcome.metrics["safety/rollbacks"] = float(state.rollbacks)
        state.count(groups, outcome.tokens, outcome.updates)
        state.version += outcome.updates > 0 if learns else self._published(number)
        self._end_stage()
        return outcome, groups

    def check(self, stage: int, outcome: StepResult) -> None:
        """Raise TrainingError, with the reason, if the takes have nothing left to learn from."""
        if self.config.stages[stage].kind in ("rl", *PREFERENCES):
            self.guard.check(self.stages(stage, self.state.rollbacks), self.state, outcome)

    def _published(self, number: int) -> bool:
        """Return True if the run published weights after a take of a supervised stage."""
        after = self.made.version(number)
        before = self.made.version(number - 1)
        return after is not None and after > (self.state.version if before is None else before)

    def _enters_next(self) -> None:
        """Go to the stage of the next take, in which an extended run continued."""
        while self.state.stage < self.made.line[self.state.take].stage:
            next_stage(self.state)

    def _end_stage(self) -> None:
        """Go to the next stage where the run did so, and at its end where it would."""
        state, stages = self.state, self.config.stages
        if state.take in self.made.line:
            self._enters_next()
        elif stage_over(stages[state.stage], state):
            if state.stage + 1 < len(stages):
                next_stage(state)
            else:
                state.finished = True
