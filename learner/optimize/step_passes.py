"""Forward and backward passes over a minibatch, cut into micro-batches and shared by the ranks."""

import logging
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import torch

from evolver_async.config import Config
from evolver_async.metrics.writer import Timers
from evolver_async.model import policy
from evolver_async.model.projection import TokenMasks
from evolver_async.model.rows.borders import Borders
from evolver_async.model.rows.context import ContextGroup
from learner.data.batch import MicroBatch, Minibatch
from learner.data.packing import Layout
from learner.loss.accounting import Accounting
from learner.optimize.critic import Critic, CriticTraining
from learner.optimize.distillation import (
    ComparedReadout,
    Distillation,
    compared,
    from_hidden,
)
from learner.optimize.model import Models
from learner.optimize.teaching import StudentPass, Teaching
from learner.optimize.token_budget import measured
from learner.ranks.mesh import nothing, within

log = logging.getLogger(__name__)

# The loss of a micro-batch and its terms, of theta_N, entropy_N, the micro-batch, its update and
# the accounting to measure into.
MicroLoss = Callable[
    [torch.Tensor, torch.Tensor, MicroBatch, Minibatch, Accounting],
    tuple[torch.Tensor, dict[str, torch.Tensor]],
]


class StepPasses:
    """Passes of the policy of `models` over minibatches."""

    name = "policy"  # of the model, for its token budgets

    def __init__(self, models: Models, config: Config, timers: Timers) -> None:
        self.models = models
        self.config = config
        self.timers = timers
        self.ranks = models.ranks
        self.device = models.ranks.device

    @property
    def model(self) -> torch.nn.Module:
        """The model that trains; `optimizer` moves it."""
        return self.models.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.models.optimizer

    @property
    def layout(self) -> Layout:
        """Layout of the model's rows."""
        return self.models.layout

    def gradients(
        self,
        stage: Config,
        minibatch: Minibatch,
        loss: MicroLoss,
        accounting: Accounting,
        critic: CriticTraining | None,
        distillation: Distillation | None,
        teaching: Teaching | None,
    ) -> tuple[float, dict[str, float]]:
        """Accumulate gradients of a minibatch; return its loss and the terms, over all ranks.

        Only this rank's tokens are measured into `accounting`.
        """
        total, terms_of = 0.0, dict[str, float]()
        limit = self.token_budget(stage, critic and critic.critic)
        passes = self._forward(stage, minibatch, loss, accounting, critic, limit, teaching)
        for value, terms in passes:
            with self.timers("backward"):
                value.backward()
            total += float(value.detach())
            _add(terms_of, {name: float(term) for name, term in terms.items()})
        if distillation is not None:
            with self.timers("distill"):
                loss_part, more = distillation(self.models.model, minibatch, self.ranks, limit)
            total += loss_part
            _add(terms_of, more)
        return self._over_ranks(total, terms_of)

    def measured(
        self, stage: Config, minibatch: Minibatch, loss: MicroLoss
    ) -> tuple[float, dict[str, float]]:
        """Return the loss of a minibatch and its terms, over all ranks, without gradients."""
        total, terms_of = 0.0, dict[str, float]()
        limit = self.token_budget(stage, None)
        with torch.no_grad():
            for value, terms in self._forward(stage, minibatch, loss, Accounting(), None, limit):
                total += float(value)
                _add(terms_of, {name: float(term) for name, term in terms.items()})
        return self._over_ranks(total, terms_of)

    def _over_ranks(
        self, total: float, terms_of: dict[str, float]
    ) -> tuple[float, dict[str, float]]:
        """Return the sums of a loss and of its terms over all ranks."""
        if self.ranks.count == 1:
            return total, terms_of
        parts = self.ranks.gather(msgspec.msgpack.encode([total, terms_of]))
        total, terms_of = 0.0, {}
        for part in parts:
            value, terms = msgspec.msgpack.decode(part, type=tuple[float, dict[str, float]])
            total += value
            _add(terms_of, terms)
        return total, terms_of

    @torch.no_grad()
    def measure(
        self, stage: Config, minibatch: Minibatch, loss: MicroLoss, critic: Critic | None
    ) -> Accounting:
        """Return the measured tokens of a minibatch, of all ranks, for the weights as they are.

        `critic`: that of the gradients before, whose token budget is measured by now.
        """
        accounting, limit = Accounting(), self.token_budget(stage, critic)
        for _ in self._forward(stage, minibatch, loss, accounting, None, limit):
            pass
        return self.collected(accounting)

    def _forward(
        self,
        stage: Config,
        minibatch: Minibatch,
        loss: MicroLoss,
        accounting: Accounting,
        critic: CriticTraining | None,
        limit: int,
        teaching: Teaching | None = None,
    ) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Yield the loss and the terms of this rank's micro-batches of at most `limit` tokens."""
        for micro in self.ranks.passes(minibatch, limit, self.layout):
            known = None
            if teaching is not None:
                with self.timers("teacher"):
                    known = teaching.known.read(micro)
            with self.timers("forward"):
                compute = partial(self._idle, critic, self.layout != "padded")
                if micro is not None:
                    given = stage, micro, minibatch, loss, accounting, critic, teaching, known
                    compute = partial(self._loss, *given)
                value, terms = within(self.model, compute)
                # Ranks that share a row all have its loss, of which gradients are summed.
                share = 1 / self.ranks.together
                found = share * value, {name: share * term for name, term in terms.items()}
            yield found

    def _idle(
        self, critic: CriticTraining | None, packed: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a loss of 0 that reaches all weights: other ranks have more micro-batches."""
        with torch.set_grad_enabled(_moves(critic)):
            tokens_BT, hidden_BTD, borders = nothing(self.models.model, self.device, packed=packed)
            value = 0 * hidden_BTD.sum()
        if critic is not None:
            value = value + 0 * critic.critic.values(hidden_BTD, tokens_BT, borders).sum()
        return value, {}

    def collected(self, accounting: Accounting) -> Accounting:
        """Return the measured tokens of all ranks."""
        if self.ranks.count == 1:
            return accounting
        collected = Accounting()
        for part in self.ranks.gather(accounting.packed())[:: self.ranks.together]:
            collected.merge(Accounting.unpacked(part))
        return collected

    def token_budget(self, stage: Config, critic: Critic | None) -> int:
        """Return the tokens of one forward pass; with a setting of 0 they are measured once."""
        if stage.learner.token_budget:
            return stage.learner.token_budget
        budgets, trained = self.models.token_budgets, (self.name, critic is not None)
        if trained not in budgets:
            moved = [self.optimizer] + ([critic.optimizer] if critic else [])
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
        if self.layout != "padded":
            borders = Borders.of([length] * len(tokens_BT), self.device)
            tokens_BT = tokens_BT.view(1, -1)
        known_ND, teacher = None, self.models.teacher
        if teacher is not None and self.model is self.models.model:
            with torch.no_grad():
                read = partial(policy.hidden_states, teacher.model, tokens_BT, borders)
                known_ND = within(teacher.model, read)[:, :-1].flatten(0, 1)
        compute = partial(self._computed, stage, critic, tokens_BT, borders, known_ND)
        within(self.model, compute).backward()

    def _computed(
        self,
        stage: Config,
        critic: Critic | None,
        tokens_BT: torch.Tensor,
        borders: Borders | None,
        known_ND: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return a number that depends on all that a pass over these tokens computes. known_ND:
        hidden states of the teacher, None without one."""
        hidden_BTD = policy.hidden_states(self.models.model, tokens_BT, borders)
        hidden_ND, target_N = hidden_BTD[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()
        logprobs_N, entropy_N = self._logprobs(stage, hidden_ND, target_N)
        value = (logprobs_N + entropy_N).sum()
        if known_ND is not None and self.models.teacher is not None:
            compare = partial(from_hidden, self.models.teacher.head, 1.0, "forward", 0.5)
            given = ComparedReadout([known_ND], None, 1.0, compare), stage.learner.logprob_chunk
            value = value + compared(self.models.model, hidden_ND, *given, None).sum()
        if critic is not None:
            value = value + critic.values(hidden_BTD, tokens_BT, borders).sum()
        return value

    def _loss(
        self,
        stage: Config,
        micro: MicroBatch,
        minibatch: Minibatch,
        loss: MicroLoss,
        accounting: Accounting,
        critic: CriticTraining | None,
        teaching: Teaching | None,
        known: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch with gradient, the critic's and the teacher's included;
        its terms. known: what the teacher read before."""
        with torch.set_grad_enabled(_moves(critic)):
            hidden_KD = policy.hidden_states(
                self.models.model, micro.tokens_BT, micro.borders, micro.read_K
            )
            hidden_QD = hidden_KD.index_select(0, micro.source_Q)
            given = hidden_QD, micro.target_Q, micro.masks_Q, micro.context
            found_Q = self._logprobs(stage, *given)
            theta_N, entropy_N = (one.index_select(0, micro.prediction_N) for one in found_Q)
            value, terms = loss(theta_N, entropy_N, micro, minibatch, accounting)
            if stage.experience.internalise == "distill":
                value = stage.experience.loss_coef * value
            if teaching is not None:
                hidden_ND = hidden_KD.index_select(0, micro.source_N)
                student = StudentPass(self.models.model, hidden_ND, theta_N, micro, known)
                more, found = teaching(student, minibatch)
                value, terms = stage.teacher.loss_coef * value + more, terms | found
        if critic is None:
            return value, terms
        values, more = critic(hidden_KD, micro, minibatch)
        return value + values, terms | more

    def _logprobs(
        self,
        stage: Config,
        hidden_ND: torch.Tensor,
        target_N: torch.Tensor,
        masks: TokenMasks | None = None,
        context: ContextGroup | None = None,
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
            masks=masks,
            context=context,
        )


def _moves(critic: CriticTraining | None) -> bool:
    """Return whether the passes are to have gradients of the policy."""
    return torch.is_grad_enabled() and (critic is None or not critic.warms_up)


def _add(sums: dict[str, float], terms: dict[str, float]) -> None:
    for name, term in terms.items():
        sums[name] = sums.get(name, 0.0) + term
