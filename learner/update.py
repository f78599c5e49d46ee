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
from evolver_async.metrics import LagAccounting, Timers
from evolver_async.schema import Array, Fork, Group, WeightId, key
from learner import state as files
from learner.advantage import advantages, finite_groups, penalised_rewards
from learner.batch import Batch, MicroBatch, Minibatch, collate, lag_table
from learner.loss import clipped_objective, kl_estimate, policy_loss, token_scale
from learner.offpolicy import account, correct, interpolated_anchor, needs_anchor_pass
from learner.optim import lr_at, make_adamw, update
from learner.outcome import Applied, Outcome, rollout_metrics
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
        metrics = rollout_metrics(groups)
        if not chosen.groups:
            return Outcome([], chosen.filtered, 0, 0, metrics)
        head = WeightId(lineage=state.lineage, step=state.version)
        lags = lag_table(chosen.groups, head, forks)
        batch = collate(chosen.groups, lags)
        # Interpolation follows one line of versions; tokens of a dead lineage are not on it.
        interpolate = stage.correction.anchor == "interpolate" and all(
            weights.lineage == head.lineage for weights in lags
        )
        sampled = state.take % stage.metrics.samples_every == 0 and stage.metrics.samples > 0
        anchor = "interpolate" if interpolate else "recompute"
        penalised = stage.loss.kl_place == "reward" and stage.loss.kl_coef > 0
        if sampled or penalised or needs_anchor_pass(stage.correction.kind, anchor):
            with self.timers("anchor"):
                batch.anchor_N = self.score(self.model, stage, batch)
        if stage.loss.kl_coef > 0:
            assert self.reference is not None, "a stage with a KL was entered without a reference"
            batch.reference_N = self.score(self.reference, stage, batch)
        reward_P = batch.reward_P
        if penalised:
            # of the present policy, as the penalty is; mu may be versions older
            kl_N = kl_estimate(
                stage.loss.kl, torch.from_numpy(batch.anchor_N), torch.from_numpy(batch.reference_N)
            ).numpy()
            reward_P = penalised_rewards(reward_P, kl_N, batch.trajectory_N, stage.loss.kl_coef)
            metrics["loss/kl"] = float(kl_N.mean()) if len(kl_N) else 0.0
        finite_P = self._spread_advantages(stage, batch, reward_P, state)
        if not finite_P.any():
            self._bad_step(state, batch, math.nan, math.nan)
        accounting = LagAccounting()
        accounting.add_trajectories(
            lag_P=batch.lag_P[finite_P],
            reward_P=batch.reward_P[finite_P],
            length_P=batch.length_P[finite_P],
        )

        def loss(
            micro: MicroBatch, minibatch: Minibatch, account_in: LagAccounting
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return self._rl_loss(stage, micro, minibatch, interpolate, account_in)

        applied = self._updates(stage, batch, state, steps, loss, accounting)
        applied.left_out |= {int(index) for index in batch.group_P[~finite_P]}
        metrics |= applied.metrics | accounting.metrics()
        return applied.outcome(chosen.groups, chosen.filtered, metrics, batch)

    def _spread_advantages(
        self, stage: Config, batch: Batch, reward_P: Array, state: State
    ) -> Array:
        """Gives tokens their advantages; groups where one is not finite are left out of the batch.

        Returns bool[P]: who is in. Rewards that are not finite never meet those of other groups.
        """
        finite_P = finite_groups(reward_P, batch.group_P)
        advantage_P = np.zeros_like(reward_P)
        if finite_P.any():
            advantage_P[finite_P], state.baseline = advantages(
                stage.advantage.kind,
                reward_P[finite_P],
                batch.group_P[finite_P],
                std=stage.advantage.std,
                baseline=state.baseline,
                baseline_decay=stage.advantage.baseline_decay,
            )
            finite_P &= finite_groups(advantage_P, batch.group_P)
        if not finite_P.all():
            groups = np.unique(batch.group_P[~finite_P])
            log.error("take %d: %d groups have no finite advantage", state.take, len(groups))
        batch.leave_out(~finite_P)
        batch.spread_advantages(np.where(finite_P, advantage_P, 0.0))
        return finite_P

    def sft(self, stage: Config, groups: list[Group], state: State, steps: int) -> Outcome:
        """Next-token training on the ACTION tokens of demonstrations."""
        batch = collate(groups, {})

        def loss(
            micro: MicroBatch, minibatch: Minibatch, _: LagAccounting
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            theta_N, entropy_N = self._forward(stage, micro)
            value = sft_loss(theta_N, tokens=minibatch.tokens)
            scale = 1 / minibatch.tokens
            return value, {
                "loss/policy": value.detach(),
                "loss/entropy": scale * entropy_N.detach().sum(),
            }

        applied = self._updates(stage, batch, state, steps, loss, LagAccounting())
        return applied.outcome(groups, {}, rollout_metrics(groups) | applied.metrics, None)

    @torch.no_grad()
    def score(self, model: torch.nn.Module, stage: Config, batch: Batch) -> np.ndarray:
        """Log-probs of all ACTION tokens of the batch under `model`, float32[N]."""
        logprobs_N = np.zeros_like(batch.mu_N)
        for micro in batch.whole().micro_batches(stage.learner.token_budget, self.device):
            logprobs_BT, _ = policy.token_logprobs(
                model,
                micro.tokens_BT,
                micro.attention_BT,
                stage.rollout.temperature,
                stage.learner.logprob_chunk,
                select_BT=micro.action_BT,
            )
            logprobs_N[micro.index_N.cpu().numpy()] = logprobs_BT[micro.action_BT].cpu().numpy()
        return logprobs_N

    def _updates(
        self, stage: Config, batch: Batch, state: State, steps: int, loss, account_in: LagAccounting
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
            total, terms_of, accounting = 0.0, dict[str, float](), LagAccounting()
            for micro in minibatch.micro_batches(learner.token_budget, self.device):
                with self.timers("forward"):
                    value, terms = loss(micro, minibatch, accounting)
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

    def _rl_loss(
        self,
        stage: Config,
        micro: MicroBatch,
        minibatch: Minibatch,
        interpolate: bool,
        accounting: LagAccounting,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        theta_N, entropy_N = self._forward(stage, micro)
        anchor_N = micro.anchor_N
        if interpolate:
            anchor_N = interpolated_anchor(theta_N, micro.mu_N, micro.lag_N)
        corrected = correct(
            theta_N,
            micro.mu_N,
            anchor_N,
            micro.trajectory_N,
            kind=stage.correction.kind,
            level=stage.correction.level,
            w_max=stage.correction.w_max,
        )
        clipped = clipped_objective(
            corrected.ratio_N,
            micro.advantage_N,
            clip_low=stage.loss.clip_low,
            clip_high=stage.loss.clip_high,
            dual_clip=stage.loss.dual_clip,
        )
        account(accounting, corrected, micro.lag_N, clipped.low_N, clipped.high_N)
        kl_N = None
        if stage.loss.kl_place == "loss" and stage.loss.kl_coef > 0:
            kl_N = kl_estimate(stage.loss.kl, theta_N, micro.reference_N)
        return policy_loss(
            corrected.weight_N * clipped.objective_N,
            token_scale(
                stage.loss.aggregation,
                micro.length_N,
                tokens=minibatch.tokens,
                trajectories=minibatch.trajectories,
                norm_tokens=stage.loss.norm_tokens,
            ),
            kl_N=kl_N,
            kl_coef=stage.loss.kl_coef,
            entropy_N=entropy_N,
            entropy_coef=stage.loss.entropy_coef,
        )

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
        arrays = {name: value for name, value in vars(batch).items() if value.dtype != object}
        np.savez(path, **arrays)
        log.error("loss %s, gradient norm %s: step skipped, batch in %s", loss, grad_norm, path)
        if state.bad_steps >= self.config.learner.max_bad_steps:
            raise TrainingError(
                f"{state.bad_steps} non-finite steps in a row; batches in {path.parent}"
            )


def _add(sums: dict[str, float], terms: dict[str, float]) -> None:
    for name, term in terms.items():
        sums[name] = sums.get(name, 0.0) + term
