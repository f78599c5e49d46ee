"""Preferences (DPO): choice of the members that are compared, and the loss of a pair. Pure.

Formulas: docs/algorithms.md, Losses.
"""

from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from torch.nn.functional import logsigmoid

from evolver_async.config import LossConfig
from evolver_async.schema import Array, Group, Role, Trajectory
from learner.data.batch import Batch, MicroBatch, Minibatch
from learner.data.selection import Selected, spread_by
from learner.diagnostics.step_result import TRUNCATED
from learner.loss.accounting import Accounting


def pairs(groups: list[Group], by: str = "reward", *, masked: bool = False) -> Selected:
    """Reduce each group to the members of most and of least reward, the first of equals.

    Filtered groups: `zero_spread`, all rewards are equal, or with `by` success all successes;
    `no_tokens`, one of the two members has no token to train; `truncated`, with `masked`: at most
    one member is not overlong.
    """
    kept: list[Group] = []
    filtered: dict[str, list[int]] = {}
    for group in groups:
        if masked:
            members = [one for one in group.trajectories if not one.overlong]
            if len(members) < min(2, len(group.trajectories)):
                filtered.setdefault(TRUNCATED, []).append(group.group_id)
                continue
            group = replace(group, trajectories=members)
        best = min(group.trajectories, key=lambda one: (-one.reward, one.member))
        worst = min(group.trajectories, key=lambda one: (one.reward, one.member))
        if min(spread_by(group, by), spread_by(group, "reward")) == 0:
            filtered.setdefault("zero_spread", []).append(group.group_id)
        elif not (_trains(best) and _trains(worst)):
            filtered.setdefault("no_tokens", []).append(group.group_id)
        else:
            pair = sorted((best, worst), key=lambda one: one.member)
            kept.append(replace(group, trajectories=pair))
    return Selected(kept, filtered)


def _trains(trajectory: Trajectory) -> bool:
    """Return True if some ACTION token has a context, with experience or without."""
    contexts = (s.roles[s.roles != Role.EXPERIENCE] for s in trajectory.sequences)
    return any((roles[1:] == Role.ACTION).any() for roles in contexts)


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
