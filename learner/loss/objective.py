"""The loss of one micro-batch of an rl stage: correction, clip, boost, KL, entropy, accounting."""

from dataclasses import dataclass

import torch

from evolver_async.config import Correction, Loss
from evolver_async.config.sections.learner import by_kind
from learner.data.batch import MicroBatch, Minibatch
from learner.diagnostics.offpolicy import Accounting
from learner.loss.correction import Corrected, correct, interpolated_anchor, log_rho
from learner.loss.policy import (
    Clipped,
    boosted,
    clipped_objective,
    kl_estimate,
    policy_loss,
    token_scale,
    unclipped_objective,
)


@dataclass(frozen=True)
class Objective:
    """A stage's correction and loss. `boosts`: some tokens of the step have lost their experience,
    and their upper clip is loss.boost. `interpolates`: the anchor is made of theta and mu here, but
    for tokens that abandoned weights sampled.
    """

    correction: Correction
    loss: Loss
    interpolates: bool
    boosts: bool

    def __post_init__(self) -> None:
        closed = by_kind(self.correction, self.loss)
        assert closed == (self.correction, self.loss), "bounds come out of stage_config"

    def __call__(
        self,
        theta_N: torch.Tensor,
        entropy_N: torch.Tensor,
        micro: MicroBatch,
        minibatch: Minibatch,
        accounting: Accounting,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and its terms, of the update `minibatch`; measures into `accounting`."""
        anchor_N = micro.anchor_N
        if self.interpolates:
            made_N = interpolated_anchor(theta_N, micro.mu_N, micro.lag_N)
            anchor_N = torch.where(micro.abandoned_N, anchor_N, made_N)
        corrected = correct(
            theta_N,
            micro.old_N,
            anchor_N,
            micro.advantage_N,
            micro.trajectory_N,
            self.correction,
        )
        clipped = self._clipped(corrected, micro)
        account(accounting, micro, corrected, clipped, log_rho(theta_N, micro.mu_N))
        if self.boosts:
            self._account_boost(accounting, micro, corrected.ratio_N)
        kl_N = None
        if self.loss.kl_place == "loss" and self.loss.kl_coef > 0:
            kl_N = kl_estimate(self.loss.kl, theta_N, micro.reference_N)
        return policy_loss(
            corrected.weight_N * clipped.objective_N,
            token_scale(
                self.loss.aggregation,
                micro.length_N,
                tokens=minibatch.tokens,
                trajectories=minibatch.trajectories,
                norm_tokens=self.loss.norm_tokens,
            ),
            kl_N=kl_N,
            kl_coef=self.loss.kl_coef,
            entropy_N=entropy_N,
            entropy_coef=self.loss.entropy_coef,
        )

    def _clipped(self, corrected: Corrected, micro: MicroBatch) -> Clipped:
        if not corrected.clips:
            return unclipped_objective(corrected.ratio_N, micro.advantage_N)
        return clipped_objective(
            corrected.ratio_N,
            micro.advantage_N,
            clip_low=self.loss.clip_low,
            clip_high=self._clip_high(micro),
            dual_clip=self.loss.dual_clip,
        )

    def _clip_high(self, micro: MicroBatch) -> float | torch.Tensor:
        if not self.boosts:
            return self.loss.clip_high
        usual_N = torch.full_like(micro.advantage_N, self.loss.clip_high)
        return usual_N.masked_fill(micro.stripped_N, self.loss.boost)

    def _account_boost(
        self, accounting: Accounting, micro: MicroBatch, ratio_N: torch.Tensor
    ) -> None:
        found = boosted(
            ratio_N,
            micro.advantage_N,
            micro.stripped_N,
            clip_high=self.loss.clip_high,
            boost=self.loss.boost,
        )
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
) -> None:
    """Adds one micro-batch to the accounting.

    Masked are tokens that no gradient reaches, whatever their advantage: clipped, or of weight 0.
    """
    masked_N = clipped.low_N | clipped.high_N | (corrected.weight_N == 0)
    accounting.add_tokens(
        lag_N=micro.lag_N.cpu().numpy(),
        stripped_N=micro.stripped_N.cpu().numpy(),
        w_N=corrected.w_N.cpu().numpy(),
        r_N=corrected.r_N.cpu().numpy(),
        log_rho_N=log_rho_N.cpu().numpy(),
        clipped_low_N=clipped.low_N.cpu().numpy(),
        clipped_high_N=clipped.high_N.cpu().numpy(),
        masked_N=masked_N.cpu().numpy(),
    )
