"""Loss of one micro-batch: correction, clip, boost, KL, entropy of rl; supervised stages."""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from evolver_async.config import CorrectionConfig, LossConfig
from evolver_async.config.sections.learner import by_kind
from evolver_async.errors import Inconsistency
from evolver_async.schema import Array
from learner.data.batch import Batch, LogProbs, MicroBatch, Minibatch
from learner.loss.accounting import Accounting
from learner.loss.applied import corrected_tokens, not_finite, prepared
from learner.loss.correction import (
    ActionTokens,
    Corrected,
    StepTokens,
    facts_of,
)
from learner.loss.ratios import interpolated_anchor, log_rho, trajectory_totals
from learner.loss.terms import (
    Clipped,
    boosted,
    clipped_objective,
    kl_estimate,
    policy_loss,
    sft_loss,
    token_scale,
    unclipped_objective,
)


@dataclass(frozen=True)
class Objective:
    """A stage's correction and loss, with a step's batch, its log-probs and advantages.

    `boosts`: some tokens of the step have lost their experience, and their upper clip is
    loss.boost. `interpolates`: the anchor is interpolated between mu and theta, except for tokens
    that abandoned weights sampled. The first pass over the fresh tokens of `logprobs` records their
    anchor there. unfit: what an own correction has returned that is not finite, by name.
    """

    correction: CorrectionConfig
    loss: LossConfig
    batch: Batch
    logprobs: LogProbs
    advantage_N: Array
    interpolates: bool
    boosts: bool
    unfit: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        closed = by_kind(self.correction, self.loss)
        if closed != (self.correction, self.loss):
            raise Inconsistency("stage_config sets the bounds of the correction and the loss")

    @property
    def counts_age(self) -> bool:
        """True if nothing tells the log-probs of the weights before the step: tokens have moved
        from what the data is corrected from, since they were sampled."""
        return self.interpolates or not facts_of(self.correction).reads_anchor

    @property
    def problem(self) -> str:
        """Return what is not finite, with the key of the own function; "" if nothing is known."""
        if not self.unfit:
            return ""
        names, kind = ", ".join(sorted(self.unfit)), self.correction.kind
        return f"correction.kind: {kind} returned numbers that are not finite: {names}"

    @cached_property
    def prepared_N(self) -> Array:
        """Return what the correction prepares once for the whole step."""
        batch, logprobs, sampled_N = self.batch, self.logprobs, ~self.written_N
        tokens = StepTokens(
            old_N=logprobs.old_N[sampled_N],
            anchor_N=logprobs.anchor_N[sampled_N],
            advantage_N=self.advantage_N[sampled_N],
            trajectory_N=batch.trajectory_N[sampled_N],
            lag_N=batch.lag_N[sampled_N],
            position_N=batch.position_N[sampled_N],
            group_N=batch.group_P[batch.trajectory_N][sampled_N],
        )
        prepared_N = np.ones_like(logprobs.old_N)
        prepared_N[sampled_N] = prepared(self.correction, tokens)
        return prepared_N

    @cached_property
    def written_N(self) -> Array:
        """True for the tokens of recorded conversations, which nobody sampled; bool[N]."""
        return self.batch.written_P[self.batch.trajectory_N]

    def __call__(
        self,
        theta_N: torch.Tensor,
        entropy_N: torch.Tensor,
        micro: MicroBatch,
        minibatch: Minibatch,
        accounting: Accounting,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and its terms in the update `minibatch`; measure into `accounting`.

        A token that nobody sampled has no ratio to correct or to clip: its loss is the supervised
        one, -theta, with the weight of `loss.aggregation`, as of an advantage of 1.
        """
        if not self.batch.written_P.any():
            return self._sampled(theta_N, entropy_N, micro, minibatch, accounting)
        written_N = micro.of(self.written_N)
        supervised = -(self._scale(micro, minibatch) * theta_N)[written_N].sum()
        entropy = entropy_N.detach()[written_N].sum() / minibatch.tokens
        terms = {"loss/supervised": supervised.detach()}
        if written_N.all():
            return supervised, terms | {"loss/policy": 0 * entropy, "loss/entropy": entropy}
        kept_N = ~written_N
        given = theta_N[kept_N], entropy_N[kept_N], micro.part(kept_N), minibatch, accounting
        value, found = self._sampled(*given)
        terms["loss/entropy"] = found.pop("loss/entropy") + entropy
        return value + supervised, found | terms

    def _scale(self, micro: MicroBatch, minibatch: Minibatch) -> torch.Tensor:
        return token_scale(
            self.loss.aggregation,
            micro.length_N,
            tokens=minibatch.tokens,
            trajectories=minibatch.trajectories,
            norm_tokens=self.loss.norm_tokens,
        )

    def _sampled(
        self,
        theta_N: torch.Tensor,
        entropy_N: torch.Tensor,
        micro: MicroBatch,
        minibatch: Minibatch,
        accounting: Accounting,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and the terms of tokens that a policy sampled."""
        anchor_N, advantage_N = micro.of(self.logprobs.anchor_N), micro.of(self.advantage_N)
        if self.interpolates:
            made_N = interpolated_anchor(theta_N, micro.mu_N, micro.lag_N)
            # No line of versions leads from abandoned weights to the present ones: nothing lies
            # between.
            anchor_N = torch.where(micro.abandoned_N, anchor_N, made_N)
        if self.logprobs.fresh_N is not None:
            anchor_N = self._recorded(micro, theta_N, anchor_N)
        old_N = micro.of(self.logprobs.old_N)
        tokens = ActionTokens(
            theta_N=theta_N,
            old_N=old_N,
            anchor_N=anchor_N,
            advantage_N=advantage_N,
            trajectory_N=micro.trajectory_N,
            prepared_N=micro.of(self.prepared_N),
            lag_N=micro.lag_N,
            position_N=micro.position_N,
            group_N=micro.group_N,
        )
        corrected = corrected_tokens(tokens, self.correction)
        self.unfit.update(not_finite(corrected, tokens, self.correction))
        if facts_of(self.correction).scales_lr:
            log_q_P = trajectory_totals((theta_N - old_N).detach(), micro.trajectory_N)
            accounting.add_trajectories(log_q_P.cpu().numpy())
        clipped = self._clipped(corrected, advantage_N, micro.stripped_N)
        # From the weights before the step, if their log-probs are known. From the behaviour policy,
        # the age of the data and removed context would end steps that have moved nothing. Data of
        # no line of versions are of any age: under a bound their anchor is always scored.
        before_N = old_N if self.counts_age else anchor_N
        if math.isfinite(self.loss.target_kl):
            before_N = torch.where(micro.abandoned_N, anchor_N, before_N)
        log_moved_N = log_rho(theta_N, before_N)
        account(accounting, micro, corrected, clipped, log_rho(theta_N, micro.mu_N), log_moved_N)
        if self.boosts:
            self._account_boost(accounting, corrected.ratio_N, advantage_N, micro.stripped_N)
        kl_N = None
        if self.loss.kl_place == "loss" and self.loss.kl_coef > 0:
            kl_N = kl_estimate(self.loss.kl, theta_N, micro.of(self.logprobs.reference_N))
        return policy_loss(
            corrected.weight_N * clipped.objective_N,
            self._scale(micro, minibatch),
            kl_N=kl_N,
            kl_coef=self.loss.kl_coef,
            entropy_N=entropy_N,
            entropy_coef=self.loss.entropy_coef,
            tokens=minibatch.tokens,
        )

    def _recorded(
        self, micro: MicroBatch, theta_N: torch.Tensor, anchor_N: torch.Tensor
    ) -> torch.Tensor:
        """Return the anchor; record that of fresh tokens, whose first pass this is.

        A pass after an update finds there what its tokens moved from.
        """
        given, index = self.logprobs, micro.index_N.numpy()
        assert given.fresh_N is not None
        anchor_N = torch.where(micro.of(given.fresh_N), theta_N.detach(), anchor_N)
        given.anchor_N[index], given.fresh_N[index] = anchor_N.cpu().numpy(), False
        return anchor_N

    def _clipped(
        self, corrected: Corrected, advantage_N: torch.Tensor, stripped_N: torch.Tensor
    ) -> Clipped:
        if not facts_of(self.correction).clips:
            return unclipped_objective(corrected.ratio_N, advantage_N)
        clip_high: float | torch.Tensor = self.loss.clip_high
        if self.boosts:
            usual_N = torch.full_like(advantage_N, self.loss.clip_high)
            clip_high = usual_N.masked_fill(stripped_N, self.loss.boost)
        return clipped_objective(
            corrected.ratio_N,
            advantage_N,
            clip_low=self.loss.clip_low,
            clip_high=clip_high,
            dual_clip=self.loss.dual_clip,
        )

    def _account_boost(
        self,
        accounting: Accounting,
        ratio_N: torch.Tensor,
        advantage_N: torch.Tensor,
        stripped_N: torch.Tensor,
    ) -> None:
        bounds = {"clip_high": self.loss.clip_high, "boost": self.loss.boost}
        found = boosted(ratio_N, advantage_N, stripped_N, **bounds)
        accounting.add_boosted(
            tokens=int(found.tokens_N.sum()),
            freed=int(found.freed_N.sum()),
            bound=int(found.bound_N.sum()),
        )


def account(
    accounting: Accounting,
    micro: MicroBatch,
    corrected: Corrected,
    clipped: Clipped,
    log_rho_N: torch.Tensor,
    log_moved_N: torch.Tensor,
) -> None:
    """Add one micro-batch to the accounting.

    Masked tokens are those that get no gradient, whatever their advantage: clipped, or of weight 0.
    """
    masked_N = clipped.low_N | clipped.high_N | (corrected.weight_N == 0)
    accounting.add_tokens(
        lag_N=micro.lag_N.cpu().numpy(),
        stripped_N=micro.stripped_N.cpu().numpy(),
        swapped_N=micro.swapped_N.cpu().numpy(),
        w_N=corrected.w_N.cpu().numpy(),
        r_N=corrected.r_N.cpu().numpy(),
        log_rho_N=log_rho_N.cpu().numpy(),
        log_moved_N=log_moved_N.cpu().numpy(),
        clipped_low_N=clipped.low_N.cpu().numpy(),
        clipped_high_N=clipped.high_N.cpu().numpy(),
        masked_N=masked_N.cpu().numpy(),
        own={name: x_N.detach().cpu().numpy() for name, x_N in corrected.metrics.items()},
    )


def supervised_loss(
    theta_N: torch.Tensor,
    entropy_N: torch.Tensor,
    micro: MicroBatch,
    minibatch: Minibatch,
    accounting: Accounting,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a micro-batch and its terms; nothing is measured."""
    value = sft_loss(theta_N, tokens=minibatch.tokens)
    entropy = (1 / minibatch.tokens) * entropy_N.detach().sum()
    return value, {"loss/policy": value.detach(), "loss/entropy": entropy}
