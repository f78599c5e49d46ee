"""What one step does to the policy: its groups in, new weights and measurements out.

Holds the model, its optimizer and, where a stage asks for them, the frozen reference and the
critic. Knows nothing of sockets, versions published or files besides checkpoints.
"""

import math
from pathlib import Path

import torch

from evolver_async.config import Config
from evolver_async.lineages import Fork
from evolver_async.metrics.writer import Timers
from evolver_async.model import lora, policy
from evolver_async.schema import Group, WeightId
from learner import state as files
from learner.advantage.assign import give_credit, penalises, rewards_of
from learner.advantage.critic import Critic
from learner.advantage.gae import WITH_CRITIC
from learner.advantage.group_relative import label_metrics
from learner.advantage.shaping import without_overlong
from learner.data.batch import Batch, MicroBatch, Minibatch
from learner.data.collate import Strip, collate, lag_table
from learner.data.selection import select
from learner.diagnostics.offpolicy import Accounting
from learner.diagnostics.rollouts import Outcome, env_metrics, experience_metrics, rollout_metrics
from learner.loss.correction import needs_anchor_pass
from learner.loss.dpo import Preference, mark_pairs, pairs
from learner.loss.objective import Objective
from learner.loss.sft import sft_loss
from learner.optimize.adamw import make_adamw
from learner.optimize.logprobs import Scorer, store_anchor
from learner.optimize.model import load
from learner.optimize.updates import Stepper
from learner.ranks.process_group import Ranks, alone
from learner.state import State


class Updater:
    """The model and everything that changes it."""

    def __init__(
        self, config: Config, run_dir: Path, timers: Timers, ranks: Ranks | None = None
    ) -> None:
        learner = config.learner
        self.config = config
        self.run_dir = run_dir
        self.timers = timers
        self.ranks = ranks or alone(learner.device)
        self.model = self._sharded(load(config, self._loading), master=True)
        self.optimizer = make_adamw(
            self.model.parameters(),
            betas=(learner.betas[0], learner.betas[1]),
            eps=learner.eps,
            weight_decay=learner.weight_decay,
        )
        self.stepper = Stepper(self.model, self.optimizer, config, run_dir, timers, self.ranks)
        self.reference: torch.nn.Module | None = None
        self.critic: Critic | None = None

    def begin_stage(self, stage: Config, index: int) -> None:
        """Reset the optimizer, renew the reference: what happens once, where a stage begins."""
        if self.config.stages[index].reset_optimizer:
            self.optimizer.state.clear()
            if self.critic is not None:
                self.critic.optimizer.state.clear()
        renews = self.config.stages[index].refresh_reference
        renews = renews or self.config.stages[index].kind == "dpo"
        if renews and self._needs_reference(stage, index):
            self.reference = None
        self.ensure_reference(stage, index)

    def ensure_reference(self, stage: Config, index: int) -> None:
        """The present policy becomes the KL reference where a stage needs one and none is there.

        Also after a resume, which may have switched the KL on.
        """
        if self.reference is None and self._needs_reference(stage, index):
            self.reference = self._load_reference()
            policy.load_state(self.reference, policy.state_tensors(self.model))
            self.stepper.measured.clear()  # there is less memory from here on

    def _needs_reference(self, stage: Config, index: int) -> bool:
        kind = self.config.stages[index].kind
        return kind == "dpo" or (kind == "rl" and stage.loss.kl_coef > 0)

    def save(self, directory: Path, state: State) -> None:
        files.save(
            directory,
            state,
            self.model,
            self.optimizer,
            self.reference,
            self.critic,
            rank=self.ranks.rank,
            ranks=self.ranks.count,
        )
        self.ranks.gather(b"")  # once every rank has written: rank 0 looks at what there is

    def published(self) -> dict[str, torch.Tensor]:
        """The weights to publish, in policy.dtype: views, or copies where they are sharded.

        Adapters are float32, as they are trained. Of several ranks only the first has them.
        """
        if self.ranks.mesh is None:
            return policy.state_tensors(self.model)
        settings = self.config.policy
        return self.ranks.whole(self.model, "float32" if settings.lora.rank else settings.dtype)

    def restore(self, directory: Path) -> State:
        """Become what a checkpoint holds, and nothing of what was there before; its numbers."""
        self.optimizer.state.clear()
        self.reference = self.critic = None
        if files.has_reference(directory):
            self.reference = self._load_reference()
        if files.has_critic(directory):
            self.critic = self._make_critic()
        return files.load(directory, self.model, self.optimizer, self.reference, self.critic)

    def rl(
        self, stage: Config, groups: list[Group], state: State, forks: dict[int, Fork], steps: int
    ) -> Outcome:
        """Select, collate, score, estimate advantages, take the optimizer updates of one step."""
        chosen = select(groups, stage.selection, seed=self.config.run.seed)
        metrics = self._brought(stage, groups) | chosen.metrics
        if not chosen.groups:
            return Outcome([], chosen.filtered, 0, 0, metrics)
        head = WeightId(lineage=state.lineage, step=state.version)
        lags = lag_table(chosen.groups, head, forks)
        batch = collate(chosen.groups, lags, self._strip(stage))
        # Interpolation is along one line of versions, in one context. Tokens of an abandoned
        # lineage are on no such line; where experience is stripped there are two contexts.
        interpolates = stage.correction.anchor == "interpolate" and batch.sampled is None
        self._score(stage, batch, state, interpolates)
        critic = self._value(stage, batch)
        rewards, penalty = rewards_of(batch, stage.loss)
        rewards, overlong = without_overlong(
            rewards,
            batch.length_P,
            limit=stage.advantage.overlong_limit,
            cache=stage.advantage.overlong_cache,
        )
        finite_P, found = give_credit(batch, rewards, stage.advantage, state, steps)
        batch.advantage_N *= chosen.scale
        metrics |= penalty | overlong | found
        if stage.judge.kind != "none":
            metrics |= label_metrics(rewards)
        if not finite_P.any():
            self.stepper.bad_step(state, batch, math.nan, math.nan)
        accounting = Accounting()
        accounting.set_trajectories(
            lag_P=batch.lag_P[finite_P],
            stripped_P=batch.stripped_P[finite_P],
            reward_P=batch.reward_P[finite_P],
            length_P=batch.length_P[finite_P],
        )
        boosts = batch.sampled is not None and stage.loss.boost > 0
        objective = Objective(stage.correction, stage.loss, interpolates, boosts)
        applied = self.stepper(stage, batch, state, steps, objective, accounting, critic)
        applied.left_out |= {int(index) for index in batch.group_P[~finite_P]}
        state.critic_steps += critic is not None and bool(applied.minibatches)
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

        applied = self.stepper(stage, batch, state, steps, loss, Accounting())
        metrics = self._brought(stage, groups) | applied.metrics
        return applied.outcome(groups, {}, metrics, None)

    def dpo(
        self, stage: Config, groups: list[Group], state: State, forks: dict[int, Fork], steps: int
    ) -> Outcome:
        """Preference training: the best member of each group against its worst."""
        chosen = pairs(groups)
        metrics = self._brought(stage, groups)
        if not chosen.groups:
            return Outcome([], chosen.filtered, 0, 0, metrics)
        head = WeightId(lineage=state.lineage, step=state.version)
        batch = collate(chosen.groups, lag_table(chosen.groups, head, forks), self._strip(stage))
        mark_pairs(batch)
        assert self.reference is not None, "a dpo stage was entered without a reference"
        batch.reference_N = self._scorer(stage)(self.reference, batch.whole())
        loss = Preference(stage.loss.dpo_beta)
        applied = self.stepper(stage, batch, state, steps, loss, Accounting())
        metrics |= applied.metrics
        return applied.outcome(chosen.groups, chosen.filtered, metrics, None)

    def _brought(self, stage: Config, groups: list[Group]) -> dict[str, float]:
        """Metrics of what the actors brought, before selection."""
        metrics = rollout_metrics(groups)
        if stage.experience.kind != "none":
            metrics |= experience_metrics(groups)
        if stage.tasks.mixture or stage.tasks.path:
            metrics |= env_metrics(groups)
        return metrics

    def _strip(self, stage: Config) -> Strip:
        experience = stage.experience
        return Strip(experience.strip, experience.strip_fraction, self.config.run.seed)

    def _scorer(self, stage: Config) -> Scorer:
        return Scorer(
            stage.rollout.temperature,
            self.stepper.token_budget(stage, self.critic),
            stage.learner.logprob_chunk,
            self.ranks,
            stage.learner.packing,
        )

    def _score(self, stage: Config, batch: Batch, state: State, interpolates: bool) -> None:
        """Stores the log-probs that the step needs before its first update."""
        score = self._scorer(stage)
        anchor = "interpolate" if interpolates else "recompute"
        shown = stage.metrics.samples > 0 and state.take % stage.metrics.samples_every == 0
        needed = needs_anchor_pass(stage.correction.kind, anchor)
        abandoned = interpolates and needs_anchor_pass(stage.correction.kind, "recompute")
        everywhere = shown or needed or penalises(stage.loss)
        if everywhere or batch.sampled is not None or abandoned:
            with self.timers("anchor"):
                store_anchor(
                    score,
                    self.model,
                    batch,
                    everywhere=everywhere,
                    guided=stage.correction.guided,
                    abandoned=abandoned,
                )
        if stage.loss.kl_coef > 0:
            assert self.reference is not None, "a stage with a KL was entered without a reference"
            batch.reference_N = score(self.reference, batch.whole())

    def _value(self, stage: Config, batch: Batch) -> Critic | None:
        """Stores the values of a batch's tokens where its estimator reads any; who knows them.

        The critic is made by the first step that needs one, from the policy as it is then.
        """
        if stage.advantage.kind not in WITH_CRITIC:
            return None
        if self.critic is None:
            self.critic = self._make_critic()
            self.stepper.measured.clear()  # there is less memory from here on
        with self.timers("value"):
            budget = self.stepper.token_budget(stage, self.critic)
            packed = stage.learner.packing
            self.critic.score(self.model, batch, budget, self.ranks, packed=packed)
        return self.critic

    def _make_critic(self) -> Critic:
        learner = self.config.learner
        betas = learner.betas[0], learner.betas[1]
        trunk = self._copy_decoder() if self.config.critic.kind == "separate" else None
        return Critic(self.model, trunk, self.ranks, betas=betas, eps=learner.eps)

    def _copy_decoder(self) -> torch.nn.Module:
        """The policy's decoder as it is now, with trained weights of its own."""
        decoder, _ = policy.split_model(self.model)
        if self.ranks.mesh is None:
            return lora.twin(decoder)
        copy, _ = policy.split_model(load(self.config, self._loading))
        dtype = self.config.policy.dtype
        copy = self.ranks.shard(copy, master=True, dtype=dtype, drops=True)
        policy.load_state(copy, policy.state_tensors(decoder))
        return copy

    def _load_reference(self) -> torch.nn.Module:
        if self.config.policy.lora.rank:
            if self.ranks.mesh is None:
                return lora.twin(self.model)
            return self._sharded(load(self.config, self._loading), master=True)
        settings = self.config.policy
        reference = policy.load_model(settings.path, dtype=settings.dtype, device=self._loading)
        return self._sharded(reference.requires_grad_(False), master=False)

    @property
    def _loading(self) -> str:
        """The device to load a model on: what is to be sharded goes through host memory."""
        return str(self.ranks.device) if self.ranks.mesh is None else "cpu"

    def _sharded(self, model: torch.nn.Module, *, master: bool) -> torch.nn.Module:
        return self.ranks.shard(model, master=master, dtype=self.config.policy.dtype)
