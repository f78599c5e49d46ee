"""Optimizer updates: the minibatches of a batch, one after another, by whatever loss.

Here alone weights are moved; what the loss is, and of what, others have decided.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from evolver_async import policy
from evolver_async.config import Config
from evolver_async.launch.roles import TrainingError
from evolver_async.metrics import Timers
from evolver_async.schema import key
from learner.accounting import Accounting
from learner.batch import Batch, MicroBatch, Minibatch
from learner.critic import Critic
from learner.optim import lr_at, update
from learner.outcome import Applied
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
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.run_dir = run_dir
        self.timers = timers
        self.device = next(model.parameters()).device

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
            total, terms_of, accounting = 0.0, dict[str, float](), Accounting()
            for micro in minibatch.micro_batches(learner.token_budget, self.device):
                with self.timers("forward"):
                    value, terms = self._loss(
                        stage, micro, minibatch, loss, accounting, critic, warms_up
                    )
                with self.timers("backward"):
                    value.backward()
                total += float(value.detach())
                _add(terms_of, {name: float(term) for name, term in terms.items()})
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
        return Applied.of(minibatches, applied, means)

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
            hidden_BTD = policy.hidden_states(self.model, micro.tokens_BT)
            theta_N, entropy_N = self._forward(stage, micro, hidden_BTD)
            value, terms = loss(theta_N, entropy_N, micro, minibatch, accounting)
        if critic is None:
            return value, terms
        settings = stage.critic
        values, more = critic.loss(
            hidden_BTD, micro, minibatch, clip=settings.clip, coef=settings.coef
        )
        return value + values, terms | more

    def _forward(
        self, stage: Config, micro: MicroBatch, hidden_BTD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """theta_N with gradient and entropy_N, of the ACTION tokens of a micro-batch."""
        theta_BT, entropy_BT = policy.token_logprobs(
            self.model,
            micro.tokens_BT,
            micro.attention_BT,
            stage.rollout.temperature,
            stage.learner.logprob_chunk,
            select_BT=micro.action_BT,
            hidden_BTD=hidden_BTD,
            with_entropy=True,
            entropy_top_k=stage.loss.entropy_top_k,
        )
        return theta_BT[micro.action_BT], entropy_BT[micro.action_BT]

    def bad_step(self, state: State, batch: Batch, loss: float, grad_norm: float) -> None:
        """Keep the data that led to a non-finite step; too many in a row end the run."""
        state.bad_steps += 1
        path = self.run_dir / "bad" / f"take_{state.take:06d}.npz"
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
