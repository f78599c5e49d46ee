"""One learner step: groups in, new weights and a result out.

The values of an rl step follow from one another, and none changes afterwards:

    players' groups → select → collate → log-probs → values → rewards → advantages → updates

This module knows nothing of sockets, published versions or files besides checkpoints.
"""

import errno
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from evolver_async.config import Config
from evolver_async.lineages import Fork
from evolver_async.metrics.histograms import Histogram
from evolver_async.metrics.writer import Timers
from evolver_async.model import policy
from evolver_async.room import lacks_room
from evolver_async.schema import Array, Group, WeightId
from learner.advantage.assign import assign
from learner.advantage.reliance import weighted
from learner.advantage.rewards import label_metrics, rewards_of
from learner.data.batch import Batch, LogProbs, Minibatch, Values
from learner.data.collate import Internalise, Lag, collate, lag_table
from learner.data.copied import Decode, copies
from learner.data.players import fates, groups_by_player
from learner.data.selection import select
from learner.diagnostics.bad_steps import BadSteps
from learner.diagnostics.histograms import step_histograms
from learner.diagnostics.offpolicy import trajectory_metrics
from learner.diagnostics.rollouts import copied_metrics, taken_metrics, trained_by_player
from learner.diagnostics.step_result import NON_FINITE, TRUNCATED, StepResult, Trained
from learner.loss.dpo import PreferenceLoss, pair_signs, pairs
from learner.loss.objective import Objective
from learner.loss.sft import supervised_loss
from learner.optimize.critic import CriticTraining
from learner.optimize.distill import Distillation, distillation_of
from learner.optimize.logprobs import Scorer, comes_late, late_anchor, step_logprobs
from learner.optimize.model import Models
from learner.optimize.passes import MicroLoss
from learner.optimize.updates import Applied, Failure, Stepper, UpdateLimits
from learner.ranks.process_group import Ranks, alone
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
        self.stepper = Stepper(self, config, timers)
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

    def rl(
        self,
        stage: Config,
        groups: list[Group],
        state: LearnerState,
        forks: dict[int, Fork],
        steps: int,
    ) -> StepResult:
        """Train one step on rollouts."""
        split = groups_by_player(groups, stage.advantage.baseline)
        chosen = select(split, stage.selection, seed=self.config.run.seed)
        metrics = taken_metrics(stage, groups, split) | chosen.metrics
        if not chosen.groups:
            return StepResult(*fates([], chosen.filtered), 0, 0, metrics)
        lags = lag_table(chosen.groups, state.head, forks)
        batch = self._collate(stage, chosen.groups, lags)
        self.ranks.plan(batch.whole(), self.layout, gradient=True)
        # Interpolation is along one line of versions, in one context. Tokens of an abandoned
        # lineage are on no such line, and stripped tokens have two contexts.
        interpolates = stage.correction.anchor == "interpolate" and batch.sampled is None
        anchors = {"interpolates": interpolates, "late": comes_late(stage, batch, interpolates)}
        logprobs = self._logprobs(stage, batch, state.take, **anchors)
        values = self._values(stage, batch)
        rewards, penalties = rewards_of(batch, logprobs, stage.loss, stage.advantage)
        advantages = assign(
            batch,
            logprobs,
            values,
            rewards,
            stage.advantage,
            scale=chosen.scale,
            baseline=state.baseline,
            step=state.stage_step,
            steps=steps,
        )
        advantages = weighted(advantages, batch, logprobs, coef=stage.experience.reliance_coef)
        masked_P = np.zeros_like(advantages.finite_P)
        if stage.loss.mask_truncated:  # only now, as they count in the baseline of their group
            members = [one for group in chosen.groups for one in group.trajectories]
            masked_P = np.array([one.overlong for one in members])
            metrics["train/masked_truncated"] = float(masked_P.mean())
        trained = batch.part(advantages.finite_P & ~masked_P)
        if anchors["late"] and len(trained.members):
            logprobs = self._late_anchor(stage, logprobs, trained, state.take)
        boosts = batch.sampled is not None and stage.loss.boost > 0
        advantage_N = advantages.advantage_N
        loss = Objective(
            stage.correction, stage.loss, batch, logprobs, advantage_N, interpolates, boosts
        )
        critic = self._critic_training(stage, values, advantages.return_N, state.critic_steps)
        distillation = distillation_of(stage, batch, critic, self.layout)
        applied = self._update(stage, trained, loss, state, steps, critic, distillation)
        if unfit := len(advantages.left_out):
            log.error("take %d: %d groups have no finite advantage", state.take, unfit)
        if not advantages.finite_P.any():
            applied = replace(applied, failure=Failure(math.nan, math.nan))
        self._check_finite(state, applied, batch, logprobs, advantages, cause=self._cause(loss))
        state.baseline = advantages.baseline
        state.critic_steps += critic is not None and bool(applied.minibatches)
        metrics |= penalties | advantages.metrics | _batch_metrics(stage, batch)
        trained_P = applied.trained_P(batch)
        metrics |= applied.metrics | applied.accounting.metrics()
        metrics |= trajectory_metrics(batch, trained_P)
        data = Trained(chosen.groups, batch, logprobs, advantages.advantage_N)
        left = set(batch.group_P[masked_P].tolist()).difference(batch.group_P[~masked_P].tolist())
        unfit = {NON_FINITE: advantages.left_out, TRUNCATED: left - advantages.left_out}
        result = _result(applied, chosen.groups, chosen.filtered, metrics, unfit, data)
        histograms = step_histograms(batch, trained_P, applied.accounting)
        return replace(result, histograms=histograms)

    def sft(
        self, stage: Config, groups: list[Group], state: LearnerState, steps: int
    ) -> StepResult:
        """Train one step on the next tokens of demonstrations."""
        batch = self._collate(stage, groups, {})
        self.ranks.plan(batch.whole(), self.layout, gradient=True)
        applied = self._update(stage, batch.whole(), supervised_loss, state, steps)
        self._check_finite(state, applied, batch)
        metrics = taken_metrics(stage, groups, groups) | applied.metrics
        result = _result(applied, groups, {}, metrics)
        return replace(result, histograms=_trajectory_histograms(batch))

    def dpo(
        self,
        stage: Config,
        groups: list[Group],
        state: LearnerState,
        forks: dict[int, Fork],
        steps: int,
    ) -> StepResult:
        """Train one step on preferences: the best member of each group against its worst."""
        split = groups_by_player(groups, stage.advantage.baseline)
        chosen = pairs(split, stage.selection.by, masked=stage.loss.mask_truncated)
        metrics = taken_metrics(stage, groups, split)
        if not chosen.groups:
            return StepResult(*fates([], chosen.filtered), 0, 0, metrics)
        lags = lag_table(chosen.groups, state.head, forks)
        batch = self._collate(stage, chosen.groups, lags, whole_groups=True)
        self.ranks.plan(batch.whole(), self.layout, gradient=True)
        assert self.reference is not None, "a dpo stage was entered without a reference"
        reference_N = self._scorer(stage)(self.reference, batch.whole())
        loss = PreferenceLoss(stage.loss, pair_signs(batch), reference_N)
        applied = self._update(stage, batch.whole(), loss, state, steps)
        self._check_finite(state, applied, batch, loss)
        result = _result(applied, chosen.groups, chosen.filtered, metrics | applied.metrics)
        return replace(result, histograms=_trajectory_histograms(batch))

    def _logprobs(self, stage: Config, batch: Batch, take: int, **how: bool) -> LogProbs:
        return step_logprobs(stage, batch, self._scorer(stage), self, self.timers, take=take, **how)

    def _late_anchor(
        self, stage: Config, logprobs: LogProbs, trained: Minibatch, take: int
    ) -> LogProbs:
        first, *_ = self.stepper.cut(stage, trained, take)
        score = self._scorer(stage)
        with self.timers("anchor"):
            return late_anchor(stage, score, self.model, logprobs, trained, first, take)

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
            self.ensure_critic(), values.value_N, return_N, stage.critic, warms_up
        )

    def _update(
        self,
        stage: Config,
        data: Minibatch,
        loss: MicroLoss,
        state: LearnerState,
        steps: int,
        critic: CriticTraining | None = None,
        distillation: Distillation | None = None,
    ) -> Applied:
        applied = self.stepper(
            stage,
            data,
            loss,
            critic,
            distillation,
            UpdateLimits.of(stage, loss),
            take=state.take,
            step=state.stage_step,
            steps=steps,
        )
        return replace(applied, metrics=applied.metrics | self.ranks.pace())

    def _check_finite(
        self, state: LearnerState, applied: Applied, *values: object, cause: str = ""
    ) -> None:
        """Write the arrays of `values` if the step failed; TrainingError after several in a row.

        `cause`: what is not finite before the loss, "" if nothing is known of it.
        """
        self.bad_steps.tell(state.take, cause)
        if applied.failure is None:
            state.bad_steps = 0 if applied.minibatches else state.bad_steps
            return
        loss, norm = applied.failure.loss, applied.failure.grad_norm
        self.bad_steps.skipped(state, f"loss {loss}, gradient norm {norm}", cause, values)

    def _cause(self, loss: Objective) -> str:
        """Return the problem of the first rank that has one: each sees its own micro-batches."""
        problems = self.ranks.gather(loss.problem.encode())
        return next((problem.decode() for problem in problems if problem), "")

    def _collate(
        self,
        stage: Config,
        groups: list[Group],
        lags: dict[WeightId, Lag],
        *,
        whole_groups: bool = False,
    ) -> Batch:
        return collate(
            groups,
            lags,
            self._internalise(stage),
            whole_groups=whole_groups,
            grammars=lambda: self.grammars,
        )

    def _internalise(self, stage: Config) -> Internalise:
        experience = stage.experience
        none, copied = experience.internalise == "none", None
        if experience.keep_copied and not none:
            copied = partial(copies, decode=self._decode, least=experience.keep_copied)
        return Internalise(
            fraction=0.0 if none else experience.strip_fraction,
            seed=self.config.run.seed,
            teaches=experience.internalise == "distill",
            copies=copied,
        )

    @cached_property
    def _decode(self) -> Decode:
        tokenizer = policy.load_tokenizer(self.config.policy.path)
        return lambda tokens: str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    def _scorer(self, stage: Config) -> Scorer:
        return Scorer(
            stage.rollout.temperature,
            self.stepper.passes.token_budget(stage, self.critic),
            stage.learner.logprob_chunk,
            self.ranks,
            self.layout,
        )


def _batch_metrics(stage: Config, batch: Batch) -> dict[str, float]:
    """Measure the labels and the experience of the groups that train."""
    metrics = {} if stage.judge.kind == "none" else label_metrics(batch.label_U)
    return metrics | (copied_metrics(batch) if stage.experience.keep_copied else {})


def _trajectory_histograms(batch: Batch) -> dict[str, Histogram]:
    return step_histograms(batch, np.ones_like(batch.stripped_P))


def _result(
    applied: Applied,
    groups: list[Group],
    filtered: dict[str, list[int]],
    metrics: dict[str, float],
    unfit: Mapping[str, Collection[int]] = MappingProxyType({}),
    data: Trained | None = None,
) -> StepResult:
    """Sum up a step; groups without an applied update do not train. `groups`: of players, where an
    episode has several.

    `unfit`: indices of groups that could not, by reason.
    """
    lost = applied.lost(unfit)
    gone = {index for indices in lost.values() for index in indices}
    kept = [group for index, group in enumerate(groups) if index not in gone]
    metrics = metrics | trained_by_player(kept)
    lost_ids = {why: [groups[i].group_id for i in indices] for why, indices in lost.items()}
    trained, filtered = fates([group.group_id for group in kept], filtered | lost_ids)
    return StepResult(
        trained=trained,
        filtered=filtered,
        updates=len(applied.minibatches),
        tokens=sum(minibatch.tokens for minibatch in applied.minibatches),
        metrics=metrics if applied.failure is None else metrics | {"alarm/non_finite": 1.0},
        data=data,
    )
