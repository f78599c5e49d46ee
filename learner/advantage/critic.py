"""The critic: what reward the policy may still expect, of every ACTION token and behind the last.

V of a token is read where the token is predicted, before it is known. A linear head that begins
with V = 0 reads it from hidden states: the policy's own (`shared`, whose weights it then helps to
train), or those of a trunk of its own that begins as the policy's (`separate`).
"""

from functools import partial

import numpy as np
import torch

from evolver_async.model import policy
from evolver_async.model.attention import Borders
from evolver_async.schema import Array
from learner.data.batch import Batch, MicroBatch, Minibatch
from learner.optimize.adamw import make_adamw
from learner.ranks.process_group import Ranks, nothing, within


class Head(torch.nn.Module):
    """Hidden states to values: one number in float32 for each."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))
        self.bias = torch.nn.Parameter(torch.zeros(1))  # FSDP2 shards no scalar

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float() @ self.weight + self.bias


class Critic:
    """`module`: the weights that are the critic's alone, and `optimizer`, which moves them.

    trunk: what makes hidden states of tokens for it, on `ranks`; None where the policy's are read.
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
        self, hidden_BTD: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """V of the ACTION tokens, float32[N], and behind the last token of each row, float32[B].

        hidden_BTD: the policy's last hidden states.
        """
        values_BT = self.values(hidden_BTD, micro.tokens_BT, micro.borders)
        return values_BT[:, :-1][micro.action_BT[:, 1:]], values_BT.flatten()[micro.end_B]

    def values(
        self, hidden_BTD: torch.Tensor, tokens_BT: torch.Tensor, borders: Borders | None
    ) -> torch.Tensor:
        """V behind every token of rows padded or packed, float32[B, T]."""
        if "trunk" in self.module:
            hidden_BTD = policy.decode(self.module["trunk"], tokens_BT, borders)
        return self.module["head"](hidden_BTD)

    def loss(
        self,
        hidden_BTD: torch.Tensor,
        micro: MicroBatch,
        minibatch: Minibatch,
        *,
        clip: float,
        coef: float,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`coef` times the values' loss of a micro-batch of the update `minibatch`; its terms."""
        value_N, _ = self(hidden_BTD, micro)
        loss, held_N = value_loss(
            value_N, micro.value_N, micro.return_N, clip=clip, tokens=minibatch.tokens
        )
        return coef * loss, {
            "loss/value": loss.detach(),
            "critic/clipped": held_N.float().sum() / minibatch.tokens,
        }

    @torch.no_grad()
    def score(
        self,
        model: torch.nn.Module,
        batch: Batch,
        token_budget: int,
        ranks: Ranks,
        *,
        packed: bool = False,
    ) -> None:
        """Stores the values of a batch, by the weights that its step begins with."""
        whole = batch.whole()
        budget = ranks.budget(whole.row_lengths, token_budget)
        for micro in ranks.share(whole.micro_batches(budget, ranks.device, packed=packed)):
            if micro is None:
                within(model, partial(self._idle, model, ranks.device, packed))
                continue
            value_N, end_B = within(model, partial(self._of_policy, model, micro))
            batch.value_N[micro.index_N.cpu().numpy()] = value_N.cpu().numpy()
            batch.end_value_R[micro.row_B.cpu().numpy()] = end_B.cpu().numpy()
        ranks.sum(batch.value_N, batch.end_value_R)

    def _idle(self, model: torch.nn.Module, device: torch.device, packed: bool) -> None:
        """Take part in a forward pass of the other ranks that only looks."""
        tokens_BT, hidden_BTD, borders = nothing(model, device, packed=packed)
        self.values(hidden_BTD, tokens_BT, borders)

    def _of_policy(
        self, model: torch.nn.Module, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self(policy.hidden_states(model, micro.tokens_BT, micro.borders), micro)


def value_loss(
    value_N: torch.Tensor,
    old_N: torch.Tensor,
    return_N: torch.Tensor,
    *,
    clip: float,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """½ max((V - G)², (V' - G)²), V' = old + clamp(V - old, ±clip), as a mean over `tokens`.

    bool[N] besides: where the clip holds V, so that no gradient reaches it.
    """
    moved_N = value_N - old_N
    held_N = old_N + moved_N.clamp(-clip, clip)
    free, bound = (value_N - return_N) ** 2, (held_N - return_N) ** 2
    binds_N = (bound > free) & (moved_N.abs() > clip)
    return torch.maximum(free, bound).sum() / (2 * tokens), binds_N


def fit_metrics(value_N: Array, return_N: Array) -> dict[str, float]:
    """How well the values of a step, before its updates, foretold its returns.

    critic/explained: 1 - Var(G - V)/Var(G); absent where all returns are the same.
    """
    metrics = {"critic/value": float(value_N.mean()), "critic/return": float(return_N.mean())}
    spread = float(np.var(return_N))
    if spread > 0:
        metrics["critic/explained"] = 1 - float(np.var(return_N - value_N)) / spread
    return metrics
