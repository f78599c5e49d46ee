"""One learner step: groups in; new weights, and what they were made of, out.

The values of an rl step follow from one another, and none changes afterwards:

    players' groups → select → collate → log-probs → values → rewards → advantages → updates

They are tensors and decisions, of which `measure` makes all metrics at the end.

This module knows nothing of sockets, published versions or files besides checkpoints.
"""

import errno
import logging
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from evolver_async.config import Config
from evolver_async.config.sections.run import PAIRED, PREFERENCES
from evolver_async.lineages import Fork
from evolver_async.metrics.writer import Timers
from evolver_async.room import lacks_room
from evolver_async.schema import Array, Group
from learner.advantage.assign import assign, weighted
from learner.advantage.shaped_rewards import rewards_of
from learner.data.batch import Batch, Minibatch, Values
from learner.data.collate import Collator
from learner.data.players import groups_by_player
from learner.data.selection import (
    Selected,
    advantage_scale,
    pairs,
    select_beside_rows,
    trainable,
)
from learner.diagnostics.measure import Credit, StepResult, Trained
from learner.diagnostics.stop_rules import BadSteps
from learner.loss.bradley_terry import BradleyTerry
from learner.loss.dpo import PreferenceLoss, pair_signs
from learner.loss.kto import KtoLoss, mismatched
from learner.loss.objective import Objective, supervised_loss
from learner.optimize import reward_model
from learner.optimize.critic import CriticTraining
from learner.optimize.distillation import Distillation, distillation_of
from learner.optimize.logprobs import Scorer, comes_late, late_anchor, step_logprobs
from learner.optimize.model import Models
from learner.optimize.reward_passes import RewardPasses
from learner.optimize.step_passes import MicroLoss, StepPasses
from learner.optimize.teaching import Teaching, teaching_of
from learner.optimize.updates import Applied, Failure, Stepper, UpdateLimits
from learner.ranks.mesh import Ranks, alone
from learner.state import LearnerState

log = logging.getLogger(__name__)


class Updater(Models):
    """Models of a learner and the steps that change them."""

    def __init__(
        self, config: Config, run_dir: Path, timers: Timers, ranks: Ranks | None = None
    ) -> None:
        super().__init__(config, ranks or alone(config.learner.device))
        self.run_dir = run_dir
        self.timers = timers
        self.stepper = Stepper(StepPasses(self, config, timers))
        self.reward_stepper = Stepper(RewardPasses(self, config, timers))
        self.collate = Collator(config.run.seed, self.decode, lambda: self.grammars)
        self.bad_steps = BadSteps(run_dir, config.learner.max_bad_steps, self.ranks.rank == 0)

    def save(self, directory: Path, state: LearnerState) -> None:
        """Write tensors and numbers to a directory that exists; return when all ranks have.

        OSError on every rank if one of them has no room.
        """
        problem = ""
        try:
            if self.ranks.rank == 0:
                state.write(directory)
            self.save_tensors(directory)
        except Exception as error:
            if not lacks_room(error):
                raise
            problem = str(error)
        if problems := [one.decode() for one in self.ranks.gather(problem.encode()) if one]:
            raise OSError(errno.ENOSPC, problems[0])

    def restore(self, directory: Path) -> LearnerState:
        """Replace all tensors by those of a checkpoint; return its numbers."""
        self.restore_tensors(directory)
        return LearnerState.read(directory)

    def export_reward_model(self, directory: Path) -> None:
        """Write the reward model as a directory of transformers; return when rank 0 has."""
        assert self.reward_model is not None, "only a reward_model stage has one to write"
        tensors = self.reward_model.whole()
        if self.ranks.rank == 0:
            reward_model.write(self.config, tensors, directory)

    def enter(self, stage: Config, state: LearnerState) -> None:
        """Carry out a stage's beginning once; make reference and teacher at every start."""
        if state.entered < state.stage:
            self.begin_stage(stage, state.stage)
            state.entered = state.stage
        self.ensure_reference(stage, state.stage)
        self.ensure_teacher(stage)

    def step(
        self,
        kind: str,
        stage: Config,
        groups: list[Group],
        state: LearnerState,
        forks: dict[int, Fork],
        steps: int,
    ) -> StepResult:
        """Train one step of a stage of this kind, which has `steps`, and measure it."""
        return StepResult.of(self.train(kind, stage, groups, state, forks, steps), stage)

    def train(
        self,
        kind: str,
        stage: Config,
        groups: list[Group],
        state: LearnerState,
        forks: dict[int, Fork],
        steps: int,
    ) -> Trained:
        """Train one step of a stage of this kind, which has `steps`."""
        split, chosen, credit = groups, Selected(groups, {}), None
        if kind in ("rl", *PREFERENCES):
            split = groups_by_player(groups, stage.advantage.baseline)
        if kind == "rl":
            chosen = select_beside_rows(split, stage.selection, seed=self.config.run.seed)
        elif kind in PAIRED:
            chosen = pairs(split, stage.selection.by, masked=stage.loss.mask_truncated)
        else:
            chosen = trainable(split, masked=kind == "kto" and stage.loss.mask_truncated)
        if not chosen.groups:
            return Trained(kind, groups, split, chosen)
        whole = kind in PAIRED
        batch = self.collate(chosen.groups, stage.experience, state.head, forks, whole=whole)
        for _ in range(stage.learner.epochs):
            self.ranks.plan(batch.whole(), self.layout, gradient=True)
        if kind == "rl":
            share = len(chosen.groups) / len(split)
            applied, credit = self._rl(stage, batch, share, state, steps)
        elif kind in PREFERENCES:
            loss = self._preference_loss(kind, stage, chosen.groups, batch, state, forks)
            of = self._stepper(kind)
            applied = self._update(stage, batch.whole(), loss, state, steps, of=of)
            self._check_finite(state, applied, batch, loss)
        else:
            teaching = self._teaching(stage, batch, "token_mean")
            given = stage, batch.whole(), supervised_loss, state, steps
            applied = self._update(*given, teaching=teaching)
            self._check_finite(state, applied, batch)
        return Trained(kind, groups, split, chosen, batch, applied, credit)

    def validate(
        self, kind: str, stage: Config, groups: list[Group], state: LearnerState
    ) -> dict[str, float]:
        """Measure groups that never train, as a step of a stage of this kind would train on them.

        Return `validation/<name>`: of supervised kinds the loss, its perplexity and the share of
        tokens that are the likeliest, of preferences loss, accuracy and margin; {} if no group can
        be measured.
        """
        whole = kind in PAIRED
        chosen = (pairs(groups) if whole else trainable(groups)).groups
        if not chosen:
            return {}
        batch = self.collate(chosen, stage.experience, state.head, {}, whole=whole)
        data, loss, names = batch.whole(), supervised_loss, ("accuracy", "margin")
        if kind in PREFERENCES:
            loss = self._preference_loss(kind, stage, chosen, batch, state, {})
        total, terms = self._stepper(kind).passes.measured(stage, data, loss)
        found = {"loss": total, "rows": float(len(chosen))}
        found |= {name: terms[full] for name in names if (full := f"{kind}/{name}") in terms}
        if kind not in PREFERENCES:
            guessed_N = self._scorer(stage).guessed(self.model, data)
            found["perplexity"] = float(np.exp(total))
            found["token_accuracy"] = float(guessed_N.sum()) / data.tokens
        return {f"validation/{name}": value for name, value in found.items()}

    def _stepper(self, kind: str) -> Stepper:
        """Return the updates of the model that a stage of this kind trains."""
        return self.reward_stepper if kind == "reward_model" else self.stepper

    def _rl(
        self, stage: Config, batch: Batch, share: float, state: LearnerState, steps: int
    ) -> tuple[Applied, Credit]:
        """Train one step on rollouts. `share`: of the groups, the batch's."""
        # Interpolation is along one line of versions, in one context. Tokens of an abandoned
        # lineage are on no such line, and stripped tokens have two contexts.
        interpolates = stage.correction.anchor == "interpolate" and batch.sampled is None
        late = comes_late(stage, batch, interpolates)
        logprobs = step_logprobs(
            stage,
            batch,
            self._scorer(stage),
            self,
            self.timers,
            take=state.take,
            interpolates=interpolates,
            late=late,
        )
        values = self._values(stage, batch)
        rewards = rewards_of(batch, logprobs, stage.loss, stage.advantage)
        advantages = assign(
            batch,
            logprobs,
            values,
            rewards,
            stage.advantage,
            scale=advantage_scale(stage.selection, share),
            baseline=state.baseline,
            step=state.stage_step,
            steps=steps,
        )
        advantages = weighted(advantages, batch, logprobs, coef=stage.experience.reliance_coef)
        # masked only now, as they count in the baseline of their group
        masked_P = batch.overlong_P & stage.loss.mask_truncated
        trains = batch.part(advantages.finite_P & ~masked_P)
        if late and len(trains.members):
            first, *_ = self.stepper.cut(stage, trains, state.take)
            score = self._scorer(stage)
            with self.timers("anchor"):
                logprobs = late_anchor(
                    stage, score, self.model, logprobs, trains, first, state.take
                )
        boosts = batch.sampled is not None and stage.loss.boost > 0
        advantage_N = advantages.advantage_N
        loss = Objective(
            stage.correction, stage.loss, batch, logprobs, advantage_N, interpolates, boosts
        )
        critic = self._critic_training(stage, values, advantages.return_N, state.critic_steps)
        distillation = distillation_of(stage, batch, critic, self.layout, self.reference)
        teaching = self._teaching(stage, batch, stage.loss.aggregation, critic)
        given = stage, trains, loss, state, steps, critic, distillation, teaching
        applied = self._update(*given)
        if unfit := len(advantages.left_out):
            log.error("take %d: %d groups have no finite advantage", state.take, unfit)
        if not advantages.finite_P.any():
            applied = replace(applied, failure=Failure(math.nan, math.nan))
        self._check_finite(state, applied, batch, logprobs, advantages, cause=self._cause(loss))
        state.baseline = advantages.baseline
        state.critic_steps += critic is not None and bool(applied.updates)
        return applied, Credit(logprobs, values, rewards, advantages, masked_P)

    def _preference_loss(
        self,
        kind: str,
        stage: Config,
        groups: list[Group],
        batch: Batch,
        state: LearnerState,
        forks: dict[int, Fork],
    ) -> MicroLoss:
        """Make the loss of preferences: the best member of each group against its worst, or single
        judgements with the KL of the policy as it is."""
        if kind == "reward_model":
            return BradleyTerry(stage.reward_model.centre_coef)
        assert self.reference is not None, f"a {kind} stage was entered without a reference"
        score = self._scorer(stage)
        reference_N = score(self.reference, batch.whole())
        if kind == "dpo":
            return PreferenceLoss(stage.loss, pair_signs(batch), reference_N)
        others = mismatched(groups, self.config.policy.max_length)
        mixed = self.collate(others, stage.experience, state.head, forks, whole=False).whole()
        gained_N = score(self.model, mixed) - score(self.reference, mixed)
        kl = max(0.0, float(gained_N.sum()) / max(1, mixed.trajectories))
        good_P = np.array([one.success for group in groups for one in group.trajectories], bool)
        return KtoLoss(stage.loss, good_P, reference_N, kl)

    def _values(self, stage: Config, batch: Batch) -> Values | None:
        """Compute the values of a batch by the critic; None if the estimator reads none."""
        if not stage.advantage.facts.critic:
            return None
        critic = self.ensure_critic()
        with self.timers("value"):
            budget = self.stepper.passes.token_budget(stage, critic)
            return critic.score(self.model, batch, budget, self.ranks, self.layout)

    def _critic_training(
        self, stage: Config, values: Values | None, return_N: Array, critic_steps: int
    ) -> CriticTraining | None:
        """Set up the critic's part of the updates; None if the estimator reads no values."""
        if values is None:
            return None
        warms_up = critic_steps < stage.critic.warmup
        return CriticTraining(
            self.ensure_critic(),
            values.value_N,
            return_N.astype(np.float32),
            stage.critic,
            warms_up,
        )

    def _teaching(
        self,
        stage: Config,
        batch: Batch,
        aggregation: str,
        critic: CriticTraining | None = None,
    ) -> Teaching | None:
        """Set up the teacher's part of the updates; None without one, or while a critic warms up,
        which leaves the policy unchanged."""
        taught = stage.teacher.path or stage.teacher.url
        if not taught or (critic is not None and critic.warms_up):
            return None
        with self.timers("teacher"):
            score = self._scorer(stage)
            return teaching_of(stage, batch, aggregation, self.teacher, score, self.tokenizer)

    def _update(
        self,
        stage: Config,
        data: Minibatch,
        loss: MicroLoss,
        state: LearnerState,
        steps: int,
        critic: CriticTraining | None = None,
        distillation: Distillation | None = None,
        teaching: Teaching | None = None,
        of: Stepper | None = None,
    ) -> Applied:
        return (of or self.stepper)(
            stage,
            data,
            loss,
            critic,
            distillation,
            teaching,
            UpdateLimits.of(stage, loss),
            take=state.take,
            step=state.stage_step,
            steps=steps,
        )

    def _check_finite(
        self, state: LearnerState, applied: Applied, *values: object, cause: str = ""
    ) -> None:
        """Write the arrays of `values` if the step failed; TrainingError after several in a row.

        `cause`: what is not finite before the loss, "" if nothing is known of it.
        """
        self.bad_steps.tell(state.take, cause)
        if applied.failure is None:
            state.bad_steps = 0 if applied.updates else state.bad_steps
            return
        loss, norm = applied.failure.loss, applied.failure.grad_norm
        self.bad_steps.skipped(state, f"loss {loss}, gradient norm {norm}", cause, values)

    def _cause(self, loss: Objective) -> str:
        """Return the problem of the first rank that has one: each sees its own micro-batches."""
        problems = self.ranks.gather(loss.problem.encode())
        return next((problem.decode() for problem in problems if problem), "")

    def _scorer(self, stage: Config) -> Scorer:
        return Scorer(
            stage.rollout.temperature,
            self.stepper.passes.token_budget(stage, self.critic),
            stage.learner.logprob_chunk,
            self.ranks,
            self.layout,
        )
