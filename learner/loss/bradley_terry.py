"""Loss of a reward model: the better member of each pair is to score higher. Pure.

Formulas: docs/algorithms.md, Losses.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from learner.data.batch import MicroBatch, Minibatch
from learner.loss.accounting import Accounting


@dataclass(frozen=True)
class BradleyTerry:
    """Loss of the pairs in a micro-batch, as a mean over those of the update.

    A trajectory's reward is the score behind its last row. centre_coef: weight of `pair_losses`'
    second sum.
    """

    centre_coef: float

    def __call__(
        self,
        score_B: torch.Tensor,
        _: torch.Tensor,
        micro: MicroBatch,
        minibatch: Minibatch,
        accounting: Accounting,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and its terms. score_B: scores behind the rows of the micro-batch.

        reward_model/better, reward_model/worse: mean rewards of the members; margin: their
        difference; accuracy: share of pairs in the right order.
        """
        place_C2 = torch.from_numpy(last_rows(micro, minibatch)).to(score_B.device)
        better_C, worse_C = score_B[place_C2].unbind(1)
        share = 2 / minibatch.trajectories
        ordered, squared = pair_losses(better_C, worse_C)
        better_C, worse_C = better_C.detach(), worse_C.detach()
        value = share * (ordered + self.centre_coef * squared)
        return value, {
            "loss/reward_model": value.detach(),
            "reward_model/accuracy": share * (better_C > worse_C).float().sum(),
            "reward_model/margin": share * (better_C - worse_C).sum(),
            "reward_model/better": share * better_C.sum(),
            "reward_model/worse": share * worse_C.sum(),
        }


def last_rows(micro: MicroBatch, minibatch: Minibatch) -> np.ndarray:
    """Return the places in the micro-batch of the last rows of each pair, the better's first.

    int64[C, 2]. A pair is trajectories 2 i and 2 i + 1 of the batch.
    """
    batch, row_B = minibatch.batch, micro.row_B.cpu().numpy()
    owner_B = batch.trajectory_R[row_B]
    order_B = np.lexsort((row_B, owner_B))
    last = order_B[np.flatnonzero(np.diff(owner_B[order_B], append=-1))]
    place_C2 = last.reshape(-1, 2)
    reward_C2 = batch.reward_P[owner_B[place_C2]]
    return np.take_along_axis(place_C2, np.argsort(-reward_C2, 1, kind="stable"), 1)


def pair_losses(better_C: torch.Tensor, worse_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Σ -log σ(better - worse), log 2 each where both are equal, and Σ (better + worse)²."""
    return -logsigmoid(better_C - worse_C).sum(), ((better_C + worse_C) ** 2).sum()
