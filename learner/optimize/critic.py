"""Critic of a policy: the reward still expected at every ACTION token and behind the last.

V of a token is read where the token is predicted, before it is known. A linear head that begins
with V = 0 reads it from hidden states: the policy's own (`shared`, whose weights it then helps to
train), or those of a separate trunk that begins as the policy's (`separate`).
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from evolver_async.config import CriticConfig
from evolver_async.model import policy
from evolver_async.model.rows.borders import Borders
from evolver_async.schema import Array
from learner.data.batch import Batch, MicroBatch, Minibatch, Values
from learner.data.packing import Layout
from learner.loss.terms import value_loss
from learner.optimize.adamw import make_adamw
from learner.ranks.mesh import Ranks, nothing, within


class Head(torch.nn.Module):
    """Linear map from hidden states to one float32 value each."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))
        self.bias = torch.nn.Parameter(torch.zeros(1))  # FSDP2 shards no scalar

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float() @ self.weight + self.bias


class Critic:
    """Value model: `module` holds the weights that only it has, `optimizer` moves them.

    trunk: computes its hidden states, sharded over `ranks`; None if the policy's are read.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        trunk: torch.nn.Module | None,
        ranks: Ranks,
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        weight_VD = next(policy.split_model(model)[1].parameters())
        head = Head(weight_VD.shape[1]).to(ranks.device)
        head = ranks.shard(head, master=True, dtype="float32", drops=True)
        self.module = torch.nn.ModuleDict({"head": head})
        if trunk is not None:
            self.module["trunk"] = trunk
        self.optimizer = make_adamw(
            self.module.parameters(), betas=betas, eps=eps, weight_decay=0.0
        )

    def __call__(
        self, hidden_KD: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return V of the ACTION tokens, float32[N], and behind each row's last token, float32[B].

        hidden_KD: the policy's last hidden states that are read.
        """
        values_K = self.values(hidden_KD, micro.tokens_BT, micro.borders, micro.read_K)
        return values_K.index_select(0, micro.source_N), values_K.index_select(0, micro.end_B)

    def values(
        self,
        hidden: torch.Tensor,
        tokens_BT: torch.Tensor,
        borders: Borders | None,
        read_K: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return V behind every token of rows padded or packed, or behind those that are read.

        hidden: the policy's last hidden states, [B, T, D] or [K, D].
        """
        if "trunk" in self.module:
            hidden = policy.decode(self.module["trunk"], tokens_BT, borders, read_K)
        return self.module["head"](hidden)

    @torch.no_grad()
    def score(
        self,
        model: torch.nn.Module,
        batch: Batch,
        token_budget: int,
        ranks: Ranks,
        layout: Layout = "padded",
    ) -> Values:
        """Return the values of a batch by the present weights."""
        value_N = np.zeros_like(batch.mu_N)
        end_value_R = np.zeros(len(batch.trajectory_R), np.float32)
        whole = batch.whole()
        ranks.plan(whole, layout, gradient=False)
        for micro in ranks.passes(whole, token_budget, layout):
            if micro is None:
                within(model, partial(self._idle, model, ranks.device, layout != "padded"))
                continue
            found_N, found_B = within(model, partial(self._of_policy, model, micro))
            value_N[micro.index_N.numpy()] = found_N.cpu().numpy()
            end_value_R[micro.row_B.cpu().numpy()] = found_B.cpu().numpy()
        ranks.sum_passes(value_N, end_value_R)
        return Values(value_N, end_value_R)

    def _idle(self, model: torch.nn.Module, device: torch.device, packed: bool) -> None:
        """Take part in a forward pass of the other ranks that only scores."""
        tokens_BT, hidden_BTD, borders = nothing(model, device, packed=packed)
        self.values(hidden_BTD, tokens_BT, borders)

    def _of_policy(
        self, model: torch.nn.Module, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self(
            policy.hidden_states(model, micro.tokens_BT, micro.borders, micro.read_K), micro
        )


@dataclass(frozen=True)
class CriticTraining:
    """Training of a critic in one step: from `old_N` towards `return_N` of the whole batch.

    `warms_up`: the policy gets no gradient in this step.
    """

    critic: Critic
    old_N: Array
    return_N: Array
    settings: CriticConfig
    warms_up: bool

    def __call__(
        self, hidden_KD: torch.Tensor, micro: MicroBatch, minibatch: Minibatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a micro-batch of the update `minibatch`, and its terms."""
        value_N, _ = self.critic(hidden_KD, micro)
        loss, held_N = value_loss(
            value_N,
            micro.of(self.old_N),
            micro.of(self.return_N),
            clip=self.settings.clip,
            tokens=minibatch.tokens,
        )
        return self.settings.coef * loss, {
            "loss/value": loss.detach(),
            "critic/clipped": held_N.float().sum() / minibatch.tokens,
        }
