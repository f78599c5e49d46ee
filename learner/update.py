"""What one step does to the policy: its groups in, new weights and measurements out.

Holds the model, its optimizer and, where a KL is asked for, the frozen reference. Knows nothing of
sockets, versions published or files besides checkpoints.
"""

import logging
import math
from pathlib import Path

import numpy as np
import torch

from evolver_async import policy
from evolver_async.config import Config
from evolver_async.launch.roles import TrainingError
from evolver_async.metrics import Timers
from evolver_async.schema import Fork, Group, WeightId, key
from learner import state as files
from learner.accounting import Accounting
from learner.advantage import label_metrics
from learner.batch import Batch, MicroBatch, Minibatch
from learner.collate import Strip, collate, lag_table
from learner.credit import give_credit, penalises, rewards_of
from learner.objective import Objective
from learner.offpolicy import needs_anchor_pass
from learner.optim import lr_at, make_adamw, update
from learner.outcome import Applied, Outcome, experience_metrics, rollout_metrics
from learner.scoring import Scorer, store_anchor
from learner.selection import select
from learner.state import State
from learner.supervised import sft_loss

log = logging.getLogger(__name__)


class Updater:
    """The model and everything that changes it."""

    def __init__(self, config: Config, run_dir: Path, timers: Timers) -> None:
        learner = config.learner
        device = learner.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.config = config
        self.run_dir = run_dir
        self.timers = timers
        self.device = torch.device(device)
        self.model = policy.load_model(config.policy.path, dtype=config.policy.dtype, device=device)
        self.optimizer = make_adamw(
            self.model.parameters(),
            betas=(learner.betas[0], learner.betas[1]),
            eps=learner.eps,
            weight_decay=learner.weight_decay,
        )
        self.reference: torch.nn.Module | None = None

    def begin_stage(self, stage: Config, index: int) -> None:
        """Reset the optimizer, renew the reference: what happens once, where a stage begins."""
        if self.config.stages[index].reset_optimizer:
            self.optimizer.state.clear()
        if self.config.stages[index].refresh_reference and self._needs_reference(stage, index):
            self.reference = None
        self.ensure_reference(stage, index)

    def ensure_reference(self, stage: Config, index: int) -> None:
        """The present policy becomes the KL reference where a stage needs one and none is there.

        Also after a resume, which may have switched the KL on.
        """
        if self.reference is None and self._needs_reference(stage, index):
            self.reference = self._load_reference()
            policy.load_state(self.reference, policy.state_tensors(self.model))

    def _needs_reference(self, stage: Config, index: int) -> bool:
        return self.config.stages[index].kind == "rl" and stage.loss.kl_coef > 0

    def save(self, directory: Path, state: State) -> None:
        files.save(directory, state, self.model, self.optimizer, self.reference)

    def restore(self, directory: Path) -> State:
        if files.has_reference(directory):
            self.reference = self._load_reference()
        return files.load(directory, self.model, self.optimizer, self.reference)

    def rl(
        self, stage: Config, groups: list[Group], state: State, forks: dict[int, Fork], steps: int
    ) -> Outcome:
        """Select, collate, score, estimate advantages, take the optimizer updates of one step."""
        chosen = select(
            groups,
            stage.selection.kind,
            keep=stage.selection.keep,
            drop_zero=stage.selection.drop_zero,
        )
        metrics = self._brought(stage, groups)
        if not chosen.groups:
            return Outcome([], chosen.filtered, 0, 0, metrics)
        head = WeightId(lineage=state.lineage, step=state.version)
        lags = lag_table(chosen.groups, head, forks)
        batch = collate(chosen.groups, lags, self._strip(stage))
        # Interpolation follows one line of versions and one context: tokens of a dead lineage are
        # not on it, nor are those whose experience is stripped.
        interpolates = (
            stage.correction.anchor == "interpolate"
            and all(weights.lineage == head.lineage for weights in lags)
            and batch.sampled is None
        )
        self._score(stage, batch, state, interpolates)
        rewards, penalty = rewards_of(batch, stage.loss)
        finite_P, found = give_credit(batch, rewards, stage.advantage, state, steps)
        metrics |= penalty | found
        if stage.judge.kind != "none":
            metrics |= label_metrics(rewards)
        if not finite_P.any():
            self._bad_step(state, batch, math.nan, math.nan)
        accounting = Accounting()
        accounting.set_trajectories(
            lag_P=batch.lag_P[finite_P],
            stripped_P=batch.stripped_P[finite_P],
            reward_P=batch.reward_P[finite_P],
            length_P=batch.length_P[finite_P],
        )
        boosts = batch.sampled is not None and stage.loss.boost > 0
        objective = Objective(stage.correction, stage.loss, interpolates, boosts)
        applied = self._updates(stage, batch, state, steps, objective, accounting)
        applied.left_out |= {int(index) for index in batch.group_P[~finite_P]}
        metrics |= applied.metrics | accounting.metrics()
        return applied.outcome(chosen.groups, chosen.filtered, metrics, batch)

    def sft(self, stage: Config, groups: list[Group], state: State, steps: int) -> Outcome:
        """Next-token training on the ACTION tokens of demonstrations."""
        batch = collate(groups, {}, self._strip(stage))

        def loss(
            theta_N: torch.Tensor,
            entropy_N: torch.Tensor,
            micro: MicroBatch,
            minibatch: Minibatch,
            accounting: Accounting,
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            value = sft_loss(theta_N, tokens=minibatch.tokens)
            scale = 1 / minibatch.tokens
            return value, {
                "loss/policy": value.detach(),
                "loss/entropy": scale * entropy_N.detach().sum(),
            }

        applied = self._updates(stage, batch, state, steps, loss, Accounting())
        metrics = self._brought(stage, groups) | applied.metrics
        return applied.outcome(groups, {}, metrics, None)

    def _brought(self, stage: Config, groups: list[Group]) -> dict[str, float]:
        """Metrics of what the actors brought, before selection."""
        metrics = rollout_metrics(groups)
        if stage.experience.kind != "none":
            metrics |= experience_metrics(groups)
        return metrics

    def _strip(self, stage: Config) -> Strip:
        experience = stage.experience
        return Strip(experience.strip, experience.strip_fraction, self.config.run.seed)

    def _score(self, stage: Config, batch: Batch, state: State, interpolates: bool) -> None:
        """Stores the log-probs that the step needs before its first update."""
        score = Scorer(
            stage.rollout.temperature,
            stage.learner.token_budget,
            stage.learner.logprob_chunk,
            self.device,
        )
        anchor = "interpolate" if interpolates else "recompute"
        shown = stage.metrics.samples > 0 and state.take % stage.metrics.samples_every == 0
        needed = needs_anchor_pass(stage.correction.kind, anchor)
        everywhere = shown or needed or penalises(stage.loss)
        if everywhere or batch.sampled is not None:
            with self.timers("anchor"):
                store_anchor(
                    score,
                    self.model,
                    batch,
                    everywhere=everywhere,
                    guided=stage.correction.guided,
                )
        if stage.loss.kl_coef > 0:
            assert self.reference is not None, "a stage with a KL was entered without a reference"
            batch.reference_N = score(self.reference, batch.whole())

    def _updates(
        self, stage: Config, batch: Batch, state: State, steps: int, loss, account_in: Accounting
    ) -> Applied:
        """One optimizer update a minibatch; stops at the first that is not finite.

        Only what was applied is measured: `account_in` gets the tokens of these minibatches.
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
        order = key(self.config.run.seed, "minibatches", state.take)
        sums: dict[str, float] = {}
        applied: list[Minibatch] = []
        minibatches = batch.minibatches(learner.minibatches, order)
        for minibatch in minibatches:
            total, terms_of, accounting = 0.0, dict[str, float](), Accounting()
            for micro in minibatch.micro_batches(learner.token_budget, self.device):
                with self.timers("forward"):
                    theta_N, entropy_N = self._forward(stage, micro)
                    value, terms = loss(theta_N, entropy_N, micro, minibatch, accounting)
                with self.timers("backward"):
                    value.backward()
                total += float(value.detach())
                _add(terms_of, {name: float(term) for name, term in terms.items()})
            with self.timers("optimizer"):
                done = update(self.optimizer, loss=total, lr=rate, grad_clip=learner.grad_clip)
            if not done.applied:
                self._bad_step(state, batch, total, done.grad_norm)
                break
            applied.append(minibatch)
            _add(sums, terms_of | {"loss/grad_norm": done.grad_norm})
            account_in.merge(accounting)
        else:
            state.bad_steps = 0 if minibatches else state.bad_steps
        means = {name: value / len(applied) for name, value in sums.items()}
        means |= {"learner/lr": rate, "learner/updates": float(len(applied))}
        return Applied.of(minibatches, applied, means)

    def _forward(self, stage: Config, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """theta_N with gradient and entropy_N, of the ACTION tokens of a micro-batch."""
        theta_BT, entropy_BT = policy.token_logprobs(
            self.model,
            micro.tokens_BT,
            micro.attention_BT,
            stage.rollout.temperature,
            stage.learner.logprob_chunk,
            select_BT=micro.action_BT,
            with_entropy=True,
            entropy_top_k=stage.loss.entropy_top_k,
        )
        return theta_BT[micro.action_BT], entropy_BT[micro.action_BT]

    def _load_reference(self) -> torch.nn.Module:
        reference = policy.load_model(
            self.config.policy.path, dtype=self.config.policy.dtype, device=str(self.device)
        )
        return reference.requires_grad_(False)

    def _bad_step(self, state: State, batch: Batch, loss: float, grad_norm: float) -> None:
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
