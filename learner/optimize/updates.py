"""Optimizer updates: the minibatches of a step, one after another, by any loss.

Weights change here alone; `step` decides on the loss and on the data.
"""

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import torch

from evolver_async.config import Config
from evolver_async.metrics.writer import Timers
from evolver_async.model import policy
from evolver_async.model.borders import Borders
from evolver_async.randomness import key
from evolver_async.schema import Array, Group
from learner.data.batch import Batch, MicroBatch, Minibatch
from learner.diagnostics.offpolicy import Accounting
from learner.diagnostics.step_result import NON_FINITE, TARGET_KL
from learner.optimize.adamw import clear, lr_at, update
from learner.optimize.alignment import align, remember
from learner.optimize.critic import Critic, CriticTraining
from learner.optimize.distill import Distillation
from learner.optimize.model import Models
from learner.optimize.token_budget import measured
from learner.ranks.process_group import nothing, within

log = logging.getLogger(__name__)

# The loss of a micro-batch and its terms, of theta_N, entropy_N, the micro-batch, its update and
# the accounting to measure into.
MicroLoss = Callable[
    [torch.Tensor, torch.Tensor, MicroBatch, Minibatch, Accounting],
    tuple[torch.Tensor, dict[str, torch.Tensor]],
]


@dataclass(frozen=True)
class Failure:
    """Loss and gradient norm of an update that was skipped, because one is not finite."""

    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Applied:
    """Minibatches whose updates were applied; `failure` of the update that ended them, if any.

    left_out: indices of the groups that are in no applied minibatch. beyond: KL of the data of the
    update that ended the step, where it was above `target_kl`.
    """

    minibatches: list[Minibatch]
    left_out: set[int]
    failure: Failure | None
    beyond: float | None
    metrics: dict[str, float]
    accounting: Accounting

    def lost(self, groups: list[Group], unfit: Collection[int]) -> dict[str, list[int]]:
        """Return the ids of the groups that did not train, by reason; indices `unfit` are some."""
        lost = {NON_FINITE: set(unfit), TARGET_KL: set[int]()}
        lost[NON_FINITE if self.beyond is None else TARGET_KL] |= self.left_out
        return {why: [groups[i].group_id for i in sorted(lost[why])] for why in lost if lost[why]}

    def trained_P(self, batch: Batch) -> Array:
        """Return which trajectories of the batch are in an applied minibatch, bool[P]."""
        found_P = np.zeros(len(batch.group_P), bool)
        for minibatch in self.minibatches:
            found_P[minibatch.members] = True
        return found_P


class Stepper:
    """Optimizer updates of `models`; `config` is that of the whole run."""

    def __init__(self, models: Models, config: Config, timers: Timers) -> None:
        self.models = models
        self.config = config
        self.timers = timers
        self.ranks = models.ranks
        self.device = models.ranks.device

    def __call__(
        self,
        stage: Config,
        data: Minibatch,
        loss: MicroLoss,
        critic: CriticTraining | None = None,
        distillation: Distillation | None = None,
        *,
        take: int,
        step: int,
        steps: int,
        scales_lr: bool = False,
        max_cosine: float = 1.0,
        target_kl: float = math.inf,
    ) -> Applied:
        """Cut `data` into minibatches and apply one update each, until one is not finite.

        Only applied updates are measured. step: of the stage, which has `steps`. scales_lr: the
        learning rate of an update is multiplied by the square root of its `Accounting.ess_share`.
        max_cosine: the bound on the cosine of consecutive gradients (`align`), 1 for none.
        target_kl: the bound on `Accounting.kl` of every update but the first, which ends the step;
        none while the critic warms up, as the policy does not move.
        """
        rate = lr_at(step, stage.learner, steps=steps)
        others = [] if critic is None else [(critic.critic.optimizer, critic.settings.lr)]
        sums: dict[str, float] = {}
        applied: list[Minibatch] = []
        accounting, failure, beyond = Accounting(), None, None
        bound = math.inf if critic is not None and critic.warms_up else target_kl
        for minibatch in self.cut(stage, data, take):
            found = Accounting()
            total, terms_of = self._gradients(stage, minibatch, loss, found, critic, distillation)
            scale = 1.0
            if scales_lr:
                terms_of["learner/lr_scale"] = scale = self._collected(found).ess_share() ** 0.5
            moves = [(self.models.optimizer, rate * scale), *others]
            if applied and math.isfinite(total) and (beyond := self._beyond(bound, found)):
                clear(moves)
                break
            with self.timers("optimizer"):
                if max_cosine < 1:
                    terms_of["loss/grad_cosine"], grads = align(self.models.optimizer, max_cosine)
                done, *rest = update(moves, loss=total, grad_clip=stage.learner.grad_clip)
                if max_cosine < 1 and done.applied:
                    remember(self.models.optimizer, grads)
            if not done.applied:
                failure = Failure(total, sum(one.grad_norm for one in (done, *rest)))
                break
            applied.append(minibatch)
            terms_of["loss/grad_norm"] = done.grad_norm
            for one in rest:
                terms_of["critic/grad_norm"] = one.grad_norm
            _add(sums, terms_of)
            accounting.merge(found)
        means = {name: value / len(applied) for name, value in sums.items()}
        means |= {"learner/lr": rate, "learner/updates": float(len(applied))}
        means["learner/token_budget"] = self.token_budget(stage, critic and critic.critic)
        left_out = data.groups.difference(*(minibatch.groups for minibatch in applied))
        means |= {} if beyond is None else {"offpolicy/kl_beyond": beyond}
        return Applied(applied, left_out, failure, beyond, means, self._collected(accounting))

    def cut(self, stage: Config, data: Minibatch, take: int) -> list[Minibatch]:
        """Cut the data of a take into its minibatches, in the order of their updates."""
        order = key(self.config.run.seed, "minibatches", take)
        return data.split(stage.learner.minibatches, order)

    def _gradients(
        self,
        stage: Config,
        minibatch: Minibatch,
        loss: MicroLoss,
        accounting: Accounting,
        critic: CriticTraining | None,
        distillation: Distillation | None,
    ) -> tuple[float, dict[str, float]]:
        """Accumulate gradients of a minibatch; return its loss and the terms, over all ranks.

        Only this rank's tokens are measured into `accounting`.
        """
        total, terms_of, layout = 0.0, dict[str, float](), self.models.layout
        limit = self.token_budget(stage, critic.critic if critic else None)
        budget = self.ranks.budget(limit, partial(minibatch.laid_lengths, layout))
        micros = minibatch.micro_batches(budget, self.device, layout)
        for micro in self.ranks.share(micros):
            with self.timers("forward"):
                compute = partial(self._idle, critic, layout != "padded")
                if micro is not None:
                    compute = partial(self._loss, stage, micro, minibatch, loss, accounting, critic)
                value, terms = within(self.models.model, compute)
            with self.timers("backward"):
                value.backward()
            total += float(value.detach())
            _add(terms_of, {name: float(term) for name, term in terms.items()})
        if distillation is not None:
            with self.timers("distill"):
                loss_part, more = distillation(self.models.model, minibatch, self.ranks, limit)
            total += loss_part
            _add(terms_of, more)
        if self.ranks.count == 1:
            return total, terms_of
        parts = self.ranks.gather(msgspec.msgpack.encode([total, terms_of]))
        total, terms_of = 0.0, {}
        for part in parts:
            value, terms = msgspec.msgpack.decode(part, type=tuple[float, dict[str, float]])
            total += value
            _add(terms_of, terms)
        return total, terms_of

    def _idle(
        self, critic: CriticTraining | None, packed: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a loss of 0 that reaches all weights: other ranks have more micro-batches."""
        with torch.set_grad_enabled(critic is None or not critic.warms_up):
            tokens_BT, hidden_BTD, borders = nothing(self.models.model, self.device, packed=packed)
            value = 0 * hidden_BTD.sum()
        if critic is not None:
            value = value + 0 * critic.critic.values(hidden_BTD, tokens_BT, borders).sum()
        return value, {}

    def _beyond(self, target_kl: float, accounting: Accounting) -> float | None:
        """Return the KL of an update's data if it is above the bound."""
        if math.isinf(target_kl):
            return None
        kl = self._collected(accounting).kl()
        return kl if kl > target_kl else None

    def _collected(self, accounting: Accounting) -> Accounting:
        """Return the measured tokens of all ranks."""
        if self.ranks.count == 1:
            return accounting
        collected = Accounting()
        for part in self.ranks.gather(accounting.packed()):
            collected.merge(Accounting.unpacked(part))
        return collected

    def token_budget(self, stage: Config, critic: Critic | None) -> int:
        """Return the tokens of one forward pass; with a setting of 0 they are measured once."""
        if stage.learner.token_budget:
            return stage.learner.token_budget
        budgets, trained = self.models.token_budgets, critic is not None
        if trained not in budgets:
            moved = [self.models.optimizer] + ([critic.optimizer] if critic else [])
            probe = partial(self._probe, stage, critic)
            try:
                budgets[trained] = measured(probe, moved, self.ranks, self.config.policy.max_length)
            finally:
                for optimizer in moved:
                    optimizer.zero_grad(set_to_none=True)
            log.info("%d tokens per forward pass fit the GPU", budgets[trained])
        return budgets[trained]

    def _probe(self, stage: Config, critic: Critic | None, tokens: int) -> None:
        """Run a forward and backward pass like a step's, over whole contexts of `tokens` in all."""
        length = self.config.policy.max_length
        tokens_BT = torch.zeros(tokens // length, length, dtype=torch.long, device=self.device)
        borders = None
        if self.models.layout != "padded":
            borders = Borders.of([length] * len(tokens_BT), self.device)
            tokens_BT = tokens_BT.view(1, -1)

        def compute() -> torch.Tensor:
            hidden_BTD = policy.hidden_states(self.models.model, tokens_BT, borders)
            hidden_ND, target_N = hidden_BTD[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()
            logprobs_N, entropy_N = self._logprobs(stage, hidden_ND, target_N)
            value = (logprobs_N + entropy_N).sum()
            if critic is not None:
                value = value + critic.values(hidden_BTD, tokens_BT, borders).sum()
            return value

        within(self.models.model, compute).backward()

    def _loss(
        self,
        stage: Config,
        micro: MicroBatch,
        minibatch: Minibatch,
        loss: MicroLoss,
        accounting: Accounting,
        critic: CriticTraining | None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch, the critic's included, with gradient; its terms."""
        with torch.set_grad_enabled(critic is None or not critic.warms_up):
            hidden_KD = policy.hidden_states(
                self.models.model, micro.tokens_BT, micro.borders, micro.read_K
            )
            hidden_ND = hidden_KD.index_select(0, micro.source_N)
            theta_N, entropy_N = self._logprobs(stage, hidden_ND, micro.target_N)
            value, terms = loss(theta_N, entropy_N, micro, minibatch, accounting)
        if critic is None:
            return value, terms
        values, more = critic(hidden_KD, micro, minibatch)
        return value + values, terms | more

    def _logprobs(
        self, stage: Config, hidden_ND: torch.Tensor, target_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs, with gradient, and entropies of targets behind hidden states."""
        return policy.target_logprobs(
            self.models.model,
            hidden_ND,
            target_N,
            stage.rollout.temperature,
            stage.learner.logprob_chunk,
            with_entropy=True,
            entropy_top_k=stage.loss.entropy_top_k,
        )


def _add(sums: dict[str, float], terms: dict[str, float]) -> None:
    for name, term in terms.items():
        sums[name] = sums.get(name, 0.0) + term
