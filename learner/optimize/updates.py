"""Optimizer updates: the minibatches of a batch, one after another, by whatever loss.

Here alone weights are moved; what the loss is, and of what, others have decided.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from evolver_async.config import Config
from evolver_async.errors import TrainingError
from evolver_async.metrics.writer import Timers
from evolver_async.model import policy
from evolver_async.model.attention import Borders
from evolver_async.randomness import key
from learner.advantage.critic import Critic
from learner.data.batch import Batch, MicroBatch, Minibatch
from learner.diagnostics.offpolicy import Accounting
from learner.diagnostics.rollouts import Applied
from learner.optimize.adamw import lr_at, update
from learner.optimize.token_budget import measured
from learner.ranks.process_group import Ranks, nothing, within
from learner.state import State

log = logging.getLogger(__name__)

# theta_N, entropy_N, what they are of, where to measure: the loss of a micro-batch and its terms
MicroLoss = Callable[
    [torch.Tensor, torch.Tensor, MicroBatch, Minibatch, Accounting],
    tuple[torch.Tensor, dict[str, torch.Tensor]],
]


class Stepper:
    """Moves `model` with `optimizer`; `config` is that of the whole run."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Config,
        run_dir: Path,
        timers: Timers,
        ranks: Ranks,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.run_dir = run_dir
        self.timers = timers
        self.ranks = ranks
        self.device = ranks.device
        self.measured: dict[bool, int] = {}  # token budgets, without and with a critic

    def __call__(
        self,
        stage: Config,
        batch: Batch,
        state: State,
        steps: int,
        loss: MicroLoss,
        account_in: Accounting,
        critic: Critic | None = None,
    ) -> Applied:
        """One optimizer update a minibatch; stops at the first that is not finite.

        Only what was applied is measured: `account_in` gets the tokens of these minibatches. In
        the first `critic.warmup` steps of a critic the policy gets no gradient.
        """
        learner = stage.learner
        rate = lr_at(
            state.take - state.stage_take,
            lr=learner.lr,
            warmup_steps=learner.warmup_steps,
            steps=steps,
            decay=learner.decay,
            decay_start=learner.decay_start,
            lr_final=learner.lr_final,
        )
        moves: list[tuple[torch.optim.Optimizer, float]] = [(self.optimizer, rate)]
        if critic is not None:
            moves.append((critic.optimizer, stage.critic.lr))
        warms_up = critic is not None and state.critic_steps < stage.critic.warmup
        order = key(self.config.run.seed, "minibatches", state.take)
        sums: dict[str, float] = {}
        applied: list[Minibatch] = []
        minibatches = batch.minibatches(learner.minibatches, order)
        for minibatch in minibatches:
            accounting = Accounting()
            total, terms_of = self._gradients(stage, minibatch, loss, accounting, critic, warms_up)
            with self.timers("optimizer"):
                done, *others = update(moves, loss=total, grad_clip=learner.grad_clip)
            if not done.applied:
                self.bad_step(state, batch, total, sum(one.grad_norm for one in (done, *others)))
                break
            applied.append(minibatch)
            terms_of["loss/grad_norm"] = done.grad_norm
            for other in others:
                terms_of["critic/grad_norm"] = other.grad_norm
            _add(sums, terms_of)
            account_in.merge(accounting)
        else:
            state.bad_steps = 0 if minibatches else state.bad_steps
        means = {name: value / len(applied) for name, value in sums.items()}
        means |= {"learner/lr": rate, "learner/updates": float(len(applied))}
        means["learner/token_budget"] = float(self.token_budget(stage, critic))
        if self.ranks.count > 1:
            self._collect(account_in)
        return Applied.of(minibatches, applied, means)

    def _gradients(
        self,
        stage: Config,
        minibatch: Minibatch,
        loss: MicroLoss,
        accounting: Accounting,
        critic: Critic | None,
        warms_up: bool,
    ) -> tuple[float, dict[str, float]]:
        """Accumulates those of a minibatch; its loss and the terms of it, over all ranks.

        Only this rank's tokens are measured into `accounting`.
        """
        total, terms_of, packing = 0.0, dict[str, float](), stage.learner.packing
        budget = self.ranks.budget(minibatch.row_lengths, self.token_budget(stage, critic))
        micros = minibatch.micro_batches(budget, self.device, packed=packing)
        for micro in self.ranks.share(micros):
            with self.timers("forward"):
                of = partial(self._idle, critic, warms_up, packing)
                if micro is not None:
                    of = partial(
                        self._loss, stage, micro, minibatch, loss, accounting, critic, warms_up
                    )
                value, terms = within(self.model, of)
            with self.timers("backward"):
                value.backward()
            total += float(value.detach())
            _add(terms_of, {name: float(term) for name, term in terms.items()})
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
        self, critic: Critic | None, warms_up: bool, packed: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A loss of 0 by all weights that have a gradient: other ranks have more micro-batches."""
        with torch.set_grad_enabled(not warms_up):
            tokens_BT, hidden_BTD, borders = nothing(self.model, self.device, packed=packed)
            value = 0 * hidden_BTD.sum()
        if critic is not None:
            value = value + 0 * critic.values(hidden_BTD, tokens_BT, borders).sum()
        return value, {}

    def _collect(self, accounting: Accounting) -> None:
        """The tokens of all ranks instead of this one's."""
        parts = self.ranks.gather(accounting.packed())
        accounting.tokens.clear()
        accounting.boosted.clear()
        for part in parts:
            accounting.merge(Accounting.unpacked(part))

    def token_budget(self, stage: Config, critic: Critic | None) -> int:
        """Tokens of one forward pass; measured once, with a critic once more, where it is 0."""
        if stage.learner.token_budget:
            return stage.learner.token_budget
        trained = critic is not None
        if trained not in self.measured:
            moved = [self.optimizer] if critic is None else [self.optimizer, critic.optimizer]
            probe = partial(self._probe, stage, critic)
            try:
                self.measured[trained] = measured(
                    probe, moved, self.ranks, self.config.policy.max_length
                )
            finally:
                for optimizer in moved:
                    optimizer.zero_grad(set_to_none=True)
            log.info("%d tokens a forward pass fit the GPU", self.measured[trained])
        return self.measured[trained]

    def _probe(self, stage: Config, critic: Critic | None, tokens: int) -> None:
        """A forward and backward pass like a step's, of whole contexts, `tokens` in all."""
        length = self.config.policy.max_length
        tokens_BT = torch.zeros(tokens // length, length, dtype=torch.long, device=self.device)
        borders = None
        select_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        select_BT[:, 0] = False
        if stage.learner.packing:
            borders = Borders.of([length] * len(tokens_BT), self.device)
            tokens_BT, select_BT = tokens_BT.view(1, -1), select_BT.view(1, -1)

        def compute() -> torch.Tensor:
            hidden_BTD = policy.hidden_states(self.model, tokens_BT, borders)
            logprobs_BT, entropy_BT = self._logprobs(stage, tokens_BT, select_BT, hidden_BTD)
            value = (logprobs_BT + entropy_BT).sum()
            if critic is not None:
                value = value + critic.values(hidden_BTD, tokens_BT, borders).sum()
            return value

        within(self.model, compute).backward()

    def _loss(
        self,
        stage: Config,
        micro: MicroBatch,
        minibatch: Minibatch,
        loss: MicroLoss,
        accounting: Accounting,
        critic: Critic | None,
        warms_up: bool,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The policy's loss of a micro-batch and the values', with gradient, and their terms."""
        with torch.set_grad_enabled(not warms_up):
            hidden_BTD = policy.hidden_states(self.model, micro.tokens_BT, micro.borders)
            theta_BT, entropy_BT = self._logprobs(
                stage, micro.tokens_BT, micro.action_BT, hidden_BTD
            )
            theta_N, entropy_N = theta_BT[micro.action_BT], entropy_BT[micro.action_BT]
            value, terms = loss(theta_N, entropy_N, micro, minibatch, accounting)
        if critic is None:
            return value, terms
        settings = stage.critic
        values, more = critic.loss(
            hidden_BTD, micro, minibatch, clip=settings.clip, coef=settings.coef
        )
        return value + values, terms | more

    def _logprobs(
        self,
        stage: Config,
        tokens_BT: torch.Tensor,
        select_BT: torch.Tensor,
        hidden_BTD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs, with gradient, and entropies of the selected tokens, 0 elsewhere."""
        return policy.token_logprobs(
            self.model,
            tokens_BT,
            select_BT,
            stage.rollout.temperature,
            stage.learner.logprob_chunk,
            hidden_BTD=hidden_BTD,
            with_entropy=True,
            entropy_top_k=stage.loss.entropy_top_k,
        )

    def bad_step(self, state: State, batch: Batch, loss: float, grad_norm: float) -> None:
        """Keep the data that led to a non-finite step; too many in a row end the run."""
        state.bad_steps += 1
        path = self.run_dir / "bad" / f"take_{state.take:06d}.npz"
        if self.ranks.rank == 0:
            path.parent.mkdir(exist_ok=True)
            arrays = {name: value for name, value in vars(batch).items() if name != "sampled"}
            np.savez(path, **arrays)
        log.error("loss %s, gradient norm %s: step skipped, batch in %s", loss, grad_norm, path)
        if state.bad_steps >= self.config.learner.max_bad_steps:
            raise TrainingError(
                f"{state.bad_steps} non-finite steps in a row; batches in {path.parent}"
            )


def _add(sums: dict[str, float], terms: dict[str, float]) -> None:
    for name, term in terms.items():
        sums[name] = sums.get(name, 0.0) + term
