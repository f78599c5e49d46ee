"""The critic: what reward the policy may still expect, of every ACTION token and behind the last.

V of a token is read where the token is predicted, before it is known. A linear head that begins
with V = 0 reads it from hidden states: the policy's own (`shared`, whose weights it then helps to
train), or those of a trunk of its own that begins as the policy's (`separate`).
"""

import copy

import numpy as np
import torch

from evolver_async import policy
from evolver_async.schema import Array
from learner.batch import Batch, MicroBatch, Minibatch
from learner.optim import make_adamw


class Head(torch.nn.Module):
    """Hidden states to values: one number in float32 for each."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float() @ self.weight + self.bias


class Critic:
    """`module`: the weights that are the critic's alone, and `optimizer`, which moves them."""

    def __init__(
        self, model: torch.nn.Module, kind: str, *, betas: tuple[float, float], eps: float
    ) -> None:
        decoder, projection = policy.split_model(model)
        weight_VD = next(projection.parameters())
        self.module = torch.nn.ModuleDict({"head": Head(weight_VD.shape[1])})
        if kind == "separate":
            self.module["trunk"] = copy.deepcopy(decoder)
        else:
            assert kind == "shared", kind
        self.module.to(weight_VD.device)
        self.optimizer = make_adamw(
            self.module.parameters(), betas=betas, eps=eps, weight_decay=0.0
        )

    def __call__(
        self, hidden_BTD: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """V of the ACTION tokens, float32[N], and behind the last token of each row, float32[B].

        hidden_BTD: the policy's last hidden states.
        """
        if "trunk" in self.module:
            hidden_BTD = self.module["trunk"](
                input_ids=micro.tokens_BT, use_cache=False
            ).last_hidden_state
        values_BT = self.module["head"](hidden_BTD)
        last_B = micro.attention_BT.sum(1) - 1
        rows_B = torch.arange(len(last_B), device=last_B.device)
        return values_BT[:, :-1][micro.action_BT[:, 1:]], values_BT[rows_B, last_B]

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
        self, model: torch.nn.Module, batch: Batch, token_budget: int, device: torch.device
    ) -> None:
        """Stores the values of a batch, by the weights that its step begins with."""
        for micro in batch.whole().micro_batches(token_budget, device):
            value_N, end_B = self(policy.hidden_states(model, micro.tokens_BT), micro)
            batch.value_N[micro.index_N.cpu().numpy()] = value_N.cpu().numpy()
            batch.end_value_R[micro.row_B.cpu().numpy()] = end_B.cpu().numpy()


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
