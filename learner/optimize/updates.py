"""Optimizer updates: the minibatches of a step, one after another, by any loss.

Weights change here alone; `step` decides on the loss and on the data.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from evolver_async.config import Config
from evolver_async.config.sections.learner import lr_at
from evolver_async.randomness import key
from evolver_async.schema import Array
from learner.data.batch import Batch, Minibatch
from learner.loss.accounting import Accounting
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
from learner.optimize.distillation import Distillation
from learner.optimize.step_passes import MicroLoss, StepPasses
from learner.optimize.teaching import Teaching

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Loss and gradient norm of an update that was skipped, because one is not finite."""

    loss: float
    grad_norm: float


@dataclass(frozen=True)
class AppliedUpdate:
    """An optimizer update of a minibatch.

    terms: those of its loss, by name; accounting: its tokens on this rank; known: its data of all
    ranks before it, if they are needed; kl: how far these had moved; lr: that of the policy, its
    rate times `scale`; grad_norms: of the policy and of the critic, if there is one; moved: the
    weights that `lr` moved.
    """

    minibatch: Minibatch
    accounting: Accounting
    terms: dict[str, float]
    known: Accounting
    kl: float
    lr: float
    scale: float
    grad_norms: list[float]
    moved: list[torch.Tensor]


@dataclass(frozen=True)
class Applied:
    """Updates of a step that were applied; `failure` of the one that ended them, if any.

    left_out: indices of the groups that are in none. beyond: the movement above `target_kl` that
    ended the step. led: how far the last update led its data, None without a bound or an update;
    taken_back: that update was taken back, None without a bound. accounting: tokens of all ranks.
    lr: before an update's `scale`. token_budget: of one forward pass. layer_times: sums of each
    rank, [] with one alone.
    """

    updates: list[AppliedUpdate]
    left_out: set[int]
    failure: Failure | None
    beyond: float | None
    led: float | None
    taken_back: bool | None
    accounting: Accounting
    lr: float
    token_budget: int
    layer_times: list[Array]

    @property
    def tokens(self) -> int:
        """ACTION tokens in the applied updates."""
        return sum(one.minibatch.tokens for one in self.updates)

    def trained_P(self, batch: Batch) -> Array:
        """Return which trajectories of the batch are in an applied update, bool[P]."""
        found_P = np.zeros(len(batch.group_P), bool)
        for one in self.updates:
            found_P[one.minibatch.members] = True
        return found_P


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
    """Optimizer updates of the model of `passes`; `config` is that of the whole run."""

    def __init__(self, passes: StepPasses) -> None:
        self.models = passes.models
        self.config = passes.config
        self.timers = passes.timers
        self.passes = passes

    def __call__(
        self,
        stage: Config,
        data: Minibatch,
        loss: MicroLoss,
        critic: CriticTraining | None,
        distillation: Distillation | None,
        teaching: Teaching | None,
        limits: UpdateLimits,
        *,
        take: int,
        step: int,
        steps: int,
    ) -> Applied:
        """Cut `data` into minibatches and apply one update each, until one is not finite.

        step: of the stage, which has `steps`.
        """
        scales = limits.scales_lr
        rate = lr_at(step, stage.learner, steps=steps)
        others = [] if critic is None else [(critic.critic.optimizer, critic.settings.lr)]
        done, failure, ended = list[AppliedUpdate](), None, None
        bound = math.inf if critic is not None and critic.warms_up else limits.target_kl
        for minibatch in self.cut(stage, data, take):
            found = Accounting()
            given = stage, minibatch, loss, found, critic, distillation, teaching
            total, terms = self.passes.gradients(*given)
            # Ranks have to decide alike, by the data of all of them. Without a decision nothing is
            # sent.
            known = found if math.isinf(bound) and not scales else self.passes.collected(found)
            scale = known.ess_share() ** 0.5 if scales else 1.0
            kl = known.moved() if math.isfinite(bound) else 0.0
            moves = [(self.passes.optimizer, rate * scale), *others]
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
            norms = [one.grad_norm for one in (made, *rest)]
            done.append(
                AppliedUpdate(minibatch, found, terms, known, kl, rate * scale, scale, norms, moved)
            )
        own, led, taken_back = critic and critic.critic, None, None
        if math.isfinite(bound):
            measure = partial(self.passes.measure, stage, loss=loss, critic=own)
            led = self._led(done, ended, measure, bound, limits.counts_age)
            # one that is no number is beyond any bound
            taken_back = led is not None and not led <= bound
            if taken_back:
                self._take_back(done.pop())
        accounting = Accounting()
        for one in done:
            accounting.merge(one.accounting)
        return Applied(
            updates=done,
            left_out=data.groups.difference(*(one.minibatch.groups for one in done)),
            failure=failure,
            beyond=ended[2] if ended is not None else led if taken_back else None,
            led=led,
            taken_back=taken_back,
            accounting=self.passes.collected(accounting),
            lr=rate,
            token_budget=self.passes.token_budget(stage, own),
            layer_times=self.models.ranks.layer_times(),
        )

    def _led(
        self,
        done: list[AppliedUpdate],
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

    def _retrace(self, last: AppliedUpdate, *, back: bool) -> None:
        with self.timers("optimizer"):
            retrace(self.models.optimizer, last.moved, last.lr, back=back)
            follow(self.models.model.parameters())

    def _take_back(self, last: AppliedUpdate) -> None:
        with self.timers("optimizer"):
            take_back(self.models.optimizer, last.moved, last.lr)
            follow(self.models.model.parameters())

    def cut(self, stage: Config, data: Minibatch, take: int) -> list[Minibatch]:
        """Cut the data of a take into its minibatches, in the order of their updates: every epoch
        anew."""
        seed, minibatches = self.config.run.seed, list[Minibatch]()
        for epoch in range(stage.learner.epochs):
            order = key(seed, "minibatches", take, *([epoch] if epoch else []))
            minibatches += data.split(stage.learner.minibatches, order)
        return minibatches
