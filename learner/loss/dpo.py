"""Loss of preferences (DPO), pair by pair. Pure.

Formulas: docs/algorithms.md, Losses.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from evolver_async.config import LossConfig
from evolver_async.schema import Array
from learner.data.batch import Batch, MicroBatch, Minibatch
from learner.loss.accounting import Accounting


def pair_signs(batch: Batch) -> Array:
    """Return 1 for the tokens of the better member of each pair and -1 for the others, float32."""
    low_G = np.full(int(batch.group_P.max()) + 1, np.inf)
    np.minimum.at(low_G, batch.group_P, batch.reward_P)
    sign_P = np.where(batch.reward_P > low_G[batch.group_P], 1, -1)
    return sign_P[batch.trajectory_N].astype(np.float32)


@dataclass(frozen=True)
class PreferenceLoss:
    """Loss of the pairs in a micro-batch, as a mean over those of the update.

    sign_N: `pair_signs`; reference_N: log-probs under the reference; of the whole batch.
    """

    settings: LossConfig
    sign_N: Array
    reference_N: Array

    def __call__(
        self,
        theta_N: torch.Tensor,
        entropy_N: torch.Tensor,
        micro: MicroBatch,
        minibatch: Minibatch,
        accounting: Accounting,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and its terms. The margin is that of better over worse, times beta.

        dpo/better, dpo/worse: gain of each member's log-prob over the reference, in nats. dpo/nll:
        negative log-likelihood of the better member, nats a token.
        """
        sign_N, gained_N = micro.of(self.sign_N), theta_N - micro.of(self.reference_N)
        pair_N = micro.trajectory_N // 2
        zero_C = torch.zeros(int(pair_N.max()) + 1, device=theta_N.device)
        share = 2 / minibatch.trajectories
        margin_C = self.settings.dpo_beta * zero_C.index_add(0, pair_N, sign_N * gained_N)
        better_N = (sign_N > 0).to(theta_N.dtype)
        tokens_C = zero_C.index_add(0, pair_N, better_N)
        nll = share * (-zero_C.index_add(0, pair_N, better_N * theta_N) / tokens_C).sum()
        preference = share * dpo_loss(margin_C)
        held_N = gained_N.detach()
        return preference + self.settings.dpo_nll_coef * nll, {
            "loss/policy": preference.detach(),
            "loss/entropy": entropy_N.detach().sum() / minibatch.tokens,
            "dpo/nll": nll.detach(),
            "dpo/margin": share * margin_C.detach().sum(),
            "dpo/accuracy": share * (margin_C.detach() > 0).float().sum(),
            "dpo/better": share * held_N[sign_N > 0].sum(),
            "dpo/worse": share * held_N[sign_N < 0].sum(),
        }


def dpo_loss(margin_C: torch.Tensor) -> torch.Tensor:
    """Return Σ -log σ(margin) over pairs: log 2 each at margin 0."""
    return -logsigmoid(margin_C).sum()
