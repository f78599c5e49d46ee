"""Loss of single judgements (KTO): members that succeeded are good, the others are bad. Pure.

Formulas: docs/algorithms.md, Losses.
"""

from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from evolver_async.config import LossConfig
from evolver_async.schema import Array, Group, Role, Sequence, Trajectory
from learner.data.batch import MicroBatch, Minibatch
from learner.loss.accounting import Accounting


@dataclass(frozen=True)
class KtoLoss:
    """Loss of the trajectories in a micro-batch, as a mean over those of the update.

    good_P: True for desirable ones; reference_N: log-probs under the reference; both of the whole
    batch. kl: how far the policy is from the reference, in nats a trajectory, constant.
    """

    settings: LossConfig
    good_P: Array
    reference_N: Array
    kl: float

    def __call__(
        self,
        theta_N: torch.Tensor,
        entropy_N: torch.Tensor,
        micro: MicroBatch,
        minibatch: Minibatch,
        accounting: Accounting,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and its terms.

        kto/accuracy: share of the trajectories on the right side of the KL. kto/desirable,
        kto/undesirable: gain of the log-prob of such a trajectory over the reference, in nats.
        """
        good_N = micro.of(self.good_P[minibatch.batch.trajectory_N])
        zero_C = torch.zeros(int(micro.trajectory_N.max()) + 1, device=theta_N.device)
        gained_N = theta_N - micro.of(self.reference_N)
        gained_C = zero_C.index_add(0, micro.trajectory_N, gained_N)
        good_C = torch.zeros_like(zero_C, dtype=torch.bool)
        good_C = good_C.scatter(0, micro.trajectory_N, good_N)
        share = 1 / minibatch.trajectories
        value = share * kto_loss(gained_C, good_C, self.kl, self.settings)
        held_C, good = gained_C.detach(), int(self.good_P[minibatch.members].sum())
        return value, {
            "loss/policy": value.detach(),
            "loss/entropy": entropy_N.detach().sum() / minibatch.tokens,
            "kto/kl": share * (self.kl + zero_C).sum(),
            "kto/accuracy": share * ((held_C > self.kl) == good_C).float().sum(),
            "kto/desirable": held_C[good_C].sum() / max(1, good),
            "kto/undesirable": held_C[~good_C].sum() / max(1, minibatch.trajectories - good),
        }


def kto_loss(
    gained_C: torch.Tensor, good_C: torch.Tensor, kl: float, settings: LossConfig
) -> torch.Tensor:
    """Return Σ λ_D (1 - σ(β (g - kl))) over good and λ_U (1 - σ(β (kl - g))) over bad ones.

    At g = kl every trajectory costs half of its weight.
    """
    better_C = torch.where(good_C, gained_C - kl, kl - gained_C)
    good, bad = settings.kto_desirable, settings.kto_undesirable
    weight_C = torch.where(good_C, torch.full_like(gained_C, good), torch.full_like(gained_C, bad))
    return (weight_C * torch.sigmoid(-settings.kto_beta * better_C)).sum()


def mismatched(groups: list[Group], longest: int) -> list[Group]:
    """Give the actions of every trajectory the prompt of another task, for an estimate of the KL.

    A group gets the actions of the group before it, the first one those of the last. A group alone
    gets those of its own other members. Rows are cut at `longest` tokens.
    """
    found = []
    for index, group in enumerate(groups):
        others, shift = groups[index - 1].trajectories, int(len(groups) == 1)
        members = [
            _answered(one, others[(place - shift) % len(others)], longest)
            for place, one in enumerate(group.trajectories)
        ]
        found.append(replace(group, trajectories=members))
    return found


def _answered(prompt: Trajectory, answer: Trajectory, longest: int) -> Trajectory:
    """Return `answer` behind the prompt of another trajectory, whose place it takes."""
    sequences = []
    for index, sequence in enumerate(answer.sequences):
        begin = _first_action(sequence)
        if begin == len(sequence):
            continue
        before = prompt.sequences[min(index, len(prompt.sequences) - 1)]
        parts = ((before, slice(_first_action(before))), (sequence, slice(begin, None)))
        arrays = {
            name: np.concatenate([getattr(one, name)[part] for one, part in parts])[:longest]
            for name in ("tokens", "roles", "turns", "logprobs")
        }
        sequences.append(Sequence(**arrays, versions=[]))
    return replace(
        answer,
        group_id=prompt.group_id,
        member=prompt.member,
        policy="scripted",
        sequences=sequences or answer.sequences,
    )


def _first_action(sequence: Sequence) -> int:
    """Return the place of the first ACTION token, the length without one."""
    acts = np.flatnonzero(sequence.roles == Role.ACTION)
    return int(acts[0]) if len(acts) else len(sequence)
