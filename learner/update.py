"""What one step does to the policy: its groups in, new weights and measurements out.

Holds the model, its optimizer and, where a KL is asked for, the frozen reference. Knows nothing of
sockets, versions published or files besides checkpoints.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from evolver_async import policy
from evolver_async.config import Config
from evolver_async.metrics import LagAccounting, Timers
from evolver_async.schema import Fork, Group, TurnFlag, WeightId, key
from learner import state as files
from learner.advantage import advantages, penalised_rewards, zero_spread
from learner.batch import Batch, MicroBatch, Minibatch, collate, lag_table
from learner.loss import clipped_objective, kl_estimate, policy_loss, token_scale
from learner.offpolicy import account, correct, interpolated_anchor, needs_anchor_pass
from learner.optim import lr_at, make_adamw, update
from learner.selection import select
from learner.state import State
from learner.supervised import sft_loss

log = logging.getLogger(__name__)


class TrainingError(RuntimeError):
    """Training cannot usefully go on; says why."""


@dataclass
class Outcome:
    """What became of the groups of one take. `updates` optimizer updates were applied."""

    trained: list[int]
    filtered: dict[str, list[int]]
    updates: int
    tokens: int
    metrics: dict[str, float]
    batch: Batch | None = None
    groups: list[Group] = field(default_factory=list)


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

    def enter_stage(self, stage: Config, index: int) -> None:
        """What happens once, where a stage begins: optimizer reset, a reference if one is due."""
        if self.config.stages[index].reset_optimizer:
            self.optimizer.state.clear()
        refresh = self.config.stages[index].refresh_reference
        if stage.loss.kl_coef > 0 and (self.reference is None or refresh):
            self.reference = self._load_reference()
            policy.load_state(self.reference, policy.state_tensors(self.model))

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
        if sampled or needs_anchor_pass(stage.correction.kind, anchor):
            with self.timers("anchor"):
                batch.anchor_N = self.score(self.model, stage, batch)
        if self.reference is not None and stage.loss.kl_coef > 0:
            batch.reference_N = self.score(self.reference, stage, batch)
        reward_P = batch.reward_P
        if stage.loss.kl_place == "reward" and stage.loss.kl_coef > 0:
            kl_N = kl_estimate(
                stage.loss.kl, torch.from_numpy(batch.mu_N), torch.from_numpy(batch.reference_N)
            )
            reward_P = penalised_rewards(
                reward_P, kl_N.numpy(), batch.trajectory_N, stage.loss.kl_coef
            )
        advantage_P, state.baseline = advantages(
            stage.advantage.kind,
            reward_P,
            batch.group_P,
            std=stage.advantage.std,
            baseline=state.baseline,
            baseline_decay=stage.advantage.baseline_decay,
        )
        batch.spread_advantages(advantage_P)

        accounting = LagAccounting()
        accounting.add_trajectories(
            lag_P=batch.lag_P, reward_P=batch.reward_P, length_P=batch.length_P
        )

        def loss(
            micro: MicroBatch, minibatch: Minibatch
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return self._rl_loss(stage, micro, minibatch, interpolate, accounting)

        updates, measured = self._updates(stage, batch, state, steps, loss)
        metrics |= measured | accounting.metrics()
        trained = [group.group_id for group in chosen.groups]
        return Outcome(
            trained, chosen.filtered, updates, len(batch.mu_N), metrics, batch, chosen.groups
        )

    def sft(self, stage: Config, groups: list[Group], state: State, steps: int) -> Outcome:
        """Next-token training on the ACTION tokens of demonstrations."""
        batch = collate(groups, {})

        def loss(
            micro: MicroBatch, minibatch: Minibatch
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            theta_N, entropy_N = self._forward(stage, micro)
            value = sft_loss(theta_N, tokens=minibatch.tokens)
            scale = 1 / minibatch.tokens
            return value, {
                "loss/policy": value.detach(),
                "loss/entropy": scale * entropy_N.detach().sum(),
            }

        updates, measured = self._updates(stage, batch, state, steps, loss)
        metrics = rollout_metrics(groups) | measured
        return Outcome([group.group_id for group in groups], {}, updates, len(batch.mu_N), metrics)

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
        self, stage: Config, batch: Batch, state: State, steps: int, loss
    ) -> tuple[int, dict[str, float]]:
        """One optimizer update a minibatch; stops at the first that is not finite."""
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
        applied = 0
        for minibatch in batch.minibatches(learner.minibatches, order):
            total = 0.0
            for micro in minibatch.micro_batches(learner.token_budget, self.device):
                with self.timers("forward"):
                    value, terms = loss(micro, minibatch)
                with self.timers("backward"):
                    value.backward()
                total += float(value.detach())
                for name, term in terms.items():
                    sums[name] = sums.get(name, 0.0) + float(term)
            with self.timers("optimizer"):
                done = update(self.optimizer, loss=total, lr=rate, grad_clip=learner.grad_clip)
            if not done.applied:
                self._bad_step(state, batch, total, done.grad_norm)
                break
            applied += 1
            sums["loss/grad_norm"] = sums.get("loss/grad_norm", 0.0) + done.grad_norm
        else:
            state.bad_steps = 0
        means = {name: value / max(applied, 1) for name, value in sums.items()}
        return applied, means | {"learner/lr": rate, "learner/updates": float(applied)}

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


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """What the actors brought, before selection."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([trajectory.reward for trajectory in trajectories])
    group_P = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    turns = np.array([len(trajectory.turn_rewards) for trajectory in trajectories])
    errors = sum(
        int((trajectory.turn_flags & TurnFlag.FORMAT_ERROR).astype(bool).sum())
        for trajectory in trajectories
    )
    return {
        "train/reward_mean": float(rewards.mean()),
        "train/reward_std": float(rewards.std()),
        "train/success": float(np.mean([trajectory.success for trajectory in trajectories])),
        "train/turns_mean": float(turns.mean()),
        "train/format_errors": errors / max(1, int(turns.sum())),
        "train/zero_spread": float(zero_spread(rewards, group_P).mean()),
    }
