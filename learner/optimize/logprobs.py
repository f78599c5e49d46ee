"""Forward passes that only look: the log-probs that a batch needs before its updates."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from evolver_async.model import policy
from evolver_async.schema import Array
from learner.data.batch import Batch, MicroBatch, Minibatch
from learner.loss.correction import guided_old
from learner.ranks.process_group import Ranks, idle, within


@dataclass(frozen=True)
class Scorer:
    """Log-probs of ACTION tokens at a temperature, so many tokens (padding included) at a time.

    `chunk`: tokens of one chunk of the vocabulary projection; `packed`: rows are not padded.
    """

    temperature: float
    token_budget: int
    chunk: int
    ranks: Ranks
    packed: bool = False

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module, minibatch: Minibatch) -> Array:
        """Log-probs under `model`, float32[N] of the whole batch, 0 outside of the minibatch."""
        logprobs_N = np.zeros_like(minibatch.batch.mu_N)
        budget = self.ranks.budget(minibatch.row_lengths, self.token_budget)
        micros = minibatch.micro_batches(budget, self.ranks.device, packed=self.packed)
        for micro in self.ranks.share(micros):
            if micro is None:
                idle(model, self.ranks.device, packed=self.packed)
                continue
            logprobs_BT = within(model, partial(self._logprobs, model, micro))
            logprobs_N[micro.index_N.cpu().numpy()] = logprobs_BT[micro.action_BT].cpu().numpy()
        self.ranks.sum(logprobs_N)
        return logprobs_N

    def _logprobs(self, model: torch.nn.Module, micro: MicroBatch) -> torch.Tensor:
        logprobs_BT, _ = policy.token_logprobs(
            model,
            micro.tokens_BT,
            micro.attention_BT,
            self.temperature,
            self.chunk,
            select_BT=micro.action_BT,
            borders=micro.borders,
        )
        return logprobs_BT


def store_anchor(
    score: Scorer,
    model: torch.nn.Module,
    batch: Batch,
    *,
    everywhere: bool,
    guided: str,
    abandoned: bool,
) -> None:
    """Stores the anchor, of all tokens or only where it is read, and `old` of stripped tokens.

    `guided`: the correction of stripped tokens; `stale` costs one more pass over their trajectories
    in the contexts that they were sampled in. `abandoned`: the anchor of tokens that abandoned
    weights sampled is read.
    """
    if everywhere:
        batch.anchor_N = score(model, batch.whole())
    elif abandoned:
        abandoned_P = np.zeros(len(batch.length_P), bool)
        abandoned_P[batch.trajectory_N[batch.abandoned_N]] = True
        if abandoned_P.any():
            batch.anchor_N = score(model, batch.part(abandoned_P))
    elif batch.sampled is not None and guided != "behaviour":
        batch.anchor_N = score(model, batch.part(batch.stripped_P))
    if batch.sampled is None:
        return
    stripped_N = batch.stripped_N
    anchor_e_N = score(model, batch.sampled.whole()) if guided == "stale" else None
    batch.old_N = batch.mu_N.copy()
    batch.old_N[stripped_N] = guided_old(
        guided, batch.mu_N[stripped_N], batch.anchor_N[stripped_N], anchor_e_N
    )
