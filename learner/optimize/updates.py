"""Optimizer updates: the minibatches of a step, one after another, by any loss.

Weights change here alone; `step` decides on the loss and on the data.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from evolver_async.config import Config
from evolver_async.config.sections.learner import lr_at
from evolver_async.metrics.writer import Timers
from evolver_async.randomness import key
from evolver_async.schema import Array
from learner.data.batch import Batch, Minibatch
from learner.diagnostics.offpolicy import Accounting
from learner.diagnostics.step_result import NON_FINITE, TARGET_KL
from learner.loss.correction import facts_of
from learner.loss.objective import Objective
from learner.optimize.adamw import (
    clear,
    follow,
    retrace,
    take_back,
    update,
    with_gradient,
)
from learner.optimize.critic import CriticTraining
from learner.optimize.distill import DISTILL_KL, DISTILL_TOKENS, Distillation
from learner.optimize.model import Models
from learner.optimize.passes import MicroLoss, Passes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Loss and gradient norm of an update that was skipped, because one is not finite."""

    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Applied:
    """Minibatches whose updates were applied; `failure` of the update that ended them, if any.

    left_out: indices of the groups that are in no applied minibatch. beyond: the movement above
    `target_kl` that ended the step.
    """

    minibatches: list[Minibatch]
    left_out: set[int]
    failure: Failure | None
    beyond: float | None
    metrics: dict[str, float]
    accounting: Accounting

    def lost(self, unfit: Mapping[str, Collection[int]]) -> dict[str, list[int]]:
        """Return the indices of the groups that did not train, by reason; `unfit` are some."""
        lost = {NON_FINITE: set[int](), TARGET_KL: set[int]()}
        lost |= {reason: set(found) for reason, found in unfit.items()}
        cut = self.beyond is not None and self.failure is None
        lost[TARGET_KL if cut else NON_FINITE] |= self.left_out
        return {why: sorted(lost[why]) for why in lost if lost[why]}

    def trained_P(self, batch: Batch) -> Array:
        """Return which trajectories of the batch are in an applied minibatch, bool[P]."""
        found_P = np.zeros(len(batch.group_P), bool)
        for minibatch in self.minibatches:
            found_P[minibatch.members] = True
        return found_P


@dataclass(frozen=True)
class _Update:
    """An update; known: accounting of its data on all ranks before it, if needed; kl: their
    movement until then; moved: the weights that it changed at `lr`."""

    minibatch: Minibatch
    accounting: Accounting
    terms: dict[str, float]
    known: Accounting
    kl: float
    lr: float
    moved: list[torch.Tensor]


@dataclass(frozen=True)
class UpdateLimits:
    """Limits of the updates of a step.

    scales_lr: the learning rate of an update is multiplied by the square root of its
    `Accounting.ess_share`. target_kl: the bound on `Accounting.moved`, none while the critic warms
    up. Data beyond it end the step, and the last update is taken back. If no data are, the last
    update is judged by its own data, measured again. counts_age: data can be beyond the bound by
    their age; then the movement by the last update alone counts.
    """

    scales_lr: bool = False
    target_kl: float = math.inf
    counts_age: bool = False

    @classmethod
    def of(cls, stage: Config, loss: MicroLoss) -> "UpdateLimits":
        """Return the limits of a stage; only a policy loss has some."""
        if not isinstance(loss, Objective):
            return cls()
        return cls(facts_of(stage.correction).scales_lr, stage.loss.target_kl, loss.counts_age)


class Stepper:
    """Optimizer updates of `models`; `config` is that of the whole run."""

    def __init__(self, models: Models, config: Config, timers: Timers) -> None:
        self.models = models
        self.config = config
        self.timers = timers
        self.passes = Passes(models, config, timers)

    def __call__(
        self,
        stage: Config,
        data: Minibatch,
        loss: MicroLoss,
        critic: CriticTraining | None,
        distillation: Distillation | None,
        limits: UpdateLimits,
        *,
        take: int,
        step: int,
        steps: int,
    ) -> Applied:
        """Cut `data` into minibatches and apply one update each, until one is not finite.

        Only applied updates are measured. step: of the stage, which has `steps`.
        """
        scales = limits.scales_lr
        rate = lr_at(step, stage.learner, steps=steps)
        others = [] if critic is None else [(critic.critic.optimizer, critic.settings.lr)]
        done, failure, ended = list[_Update](), None, None
        bound = math.inf if critic is not None and critic.warms_up else limits.target_kl
        for minibatch in self.cut(stage, data, take):
            found = Accounting()
            given = stage, minibatch, loss, found, critic, distillation
            total, terms = self.passes.gradients(*given)
            # Ranks have to decide alike, by the data of all of them. Without a decision nothing is
            # sent.
            known = found if math.isinf(bound) and not scales else self.passes.collected(found)
            scale = known.ess_share() ** 0.5 if scales else 1.0
            kl = known.moved() if math.isfinite(bound) else 0.0
            terms |= {"learner/lr_scale": scale} if scales else {}
            moves = [(self.models.optimizer, rate * scale), *others]
            # Never before the first update: data that are beyond the bound by their age alone would
            # not be trained at all.
            if done and math.isfinite(total) and kl > bound:
                ended = minibatch, known, kl
                clear(moves)
                break
            self.models.ranks.progress.updated = True
            with self.timers("optimizer"):
                moved = with_gradient(self.models.optimizer)
                made, *rest = update(moves, loss=total, grad_clip=stage.learner.grad_clip)
            if not made.applied:
                failure = Failure(total, sum(one.grad_norm for one in (made, *rest)))
                break
            norms = zip(("loss/grad_norm", "critic/grad_norm"), (made, *rest), strict=False)
            terms |= {name: one.grad_norm for name, one in norms}
            done.append(_Update(minibatch, found, terms, known, kl, rate * scale, moved))
        means, over = {"learner/lr": rate}, None
        if math.isfinite(bound):
            own = critic and critic.critic
            measure = partial(self.passes.measure, stage, loss=loss, critic=own)
            led = self._led(done, ended, measure, bound, limits.counts_age)
            over = self._bounded(done, led, bound, means)
        beyond = over if ended is None else ended[2]
        means["learner/token_budget"] = self.passes.token_budget(stage, critic and critic.critic)
        return self._applied(data, done, failure, beyond, means)

    def _led(
        self,
        done: list[_Update],
        ended: tuple[Minibatch, Accounting, float] | None,
        measure: Callable[[Minibatch], Accounting],
        bound: float,
        counts_age: bool,
    ) -> float | None:
        """Return how far the last update moved data: those that ended the step, else its own.

        Data beyond the bound by their age alone count with the movement by that update. ended: the
        minibatch that was left out, its accounting and its movement. None without an update.
        """
        if not done:
            return None
        last = done[-1]
        if ended is not None:
            minibatch, known, kl = ended
            if not counts_age:
                return kl
            self._retrace(last, back=True)
            led = known.moved_since(measure(minibatch))
            self._retrace(last, back=False)
            if not led <= bound:
                return led
        after = measure(last.minibatch)
        return after.moved() if last.kl <= bound else after.moved_since(last.known)

    def _retrace(self, last: _Update, *, back: bool) -> None:
        with self.timers("optimizer"):
            retrace(self.models.optimizer, last.moved, last.lr, back=back)
            follow(self.models.model.parameters())

    def _bounded(
        self, done: list[_Update], led: float | None, bound: float, means: dict[str, float]
    ) -> float | None:
        """Take back the last update if it moved data beyond the bound; return how far, else
        None."""
        too_far = led is not None and not led <= bound  # one that is no number is beyond any bound
        means["learner/taken_back"] = float(too_far)
        if too_far:
            with self.timers("optimizer"):
                last = done.pop()
                take_back(self.models.optimizer, last.moved, last.lr)
                follow(self.models.model.parameters())
            return led
        means |= {} if led is None else {"offpolicy/kl_moved": led}
        return None

    def _applied(
        self,
        data: Minibatch,
        done: list[_Update],
        failure: Failure | None,
        beyond: float | None,
        means: dict[str, float],
    ) -> Applied:
        """Sum up the updates that were made and not taken back."""
        sums, accounting = Counter[str](), Accounting()
        for one in done:
            sums.update(one.terms)
            accounting.merge(one.accounting)
        if taught := sums.pop(DISTILL_TOKENS, 0):
            means[DISTILL_KL] = sums.pop(DISTILL_KL) / taught
        means |= {name: value / len(done) for name, value in sums.items()}
        means["learner/updates"] = float(len(done))
        means |= {} if beyond is None else {"offpolicy/kl_beyond": beyond}
        minibatches = [one.minibatch for one in done]
        left_out = data.groups.difference(*(one.groups for one in minibatches))
        collected = self.passes.collected(accounting)
        return Applied(minibatches, left_out, failure, beyond, means, collected)

    def cut(self, stage: Config, data: Minibatch, take: int) -> list[Minibatch]:
        """Cut the data of a take into its minibatches, in the order of their updates."""
        order = key(self.config.run.seed, "minibatches", take)
        return data.split(stage.learner.minibatches, order)
