"""Forward passes without gradient: the log-probs that a step needs before its updates."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from evolver_async.model import policy
from evolver_async.schema import Array
from learner.data.batch import Batch, MicroBatch, Minibatch
from learner.loss.ratios import guided_old
from learner.ranks.process_group import Ranks, idle, within


@dataclass(frozen=True)
class Scorer:
    """Log-probs of ACTION tokens at a temperature.

    token_budget: tokens of one forward pass, padding included; `chunk`: tokens of one chunk of the
    vocabulary projection; `packed`: rows are not padded.
    """

    temperature: float
    token_budget: int
    chunk: int
    ranks: Ranks
    packed: bool = False

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module, minibatch: Minibatch) -> Array:
        """Return log-probs under `model`, float32[N] of the batch, 0 outside of the minibatch."""
        logprobs_N = np.zeros_like(minibatch.batch.mu_N)
        budget = self.ranks.budget(minibatch.row_lengths, self.token_budget)
        micros = minibatch.micro_batches(budget, self.ranks.device, packed=self.packed)
        for micro in self.ranks.share(micros):
            if micro is None:
                idle(model, self.ranks.device, packed=self.packed)
                continue
            logprobs_BT = within(model, partial(self._logprobs, model, micro))
            logprobs_N[micro.index_N.numpy()] = logprobs_BT[micro.action_BT].cpu().numpy()
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


def anchored(batch: Batch, *, everywhere: bool, guided: str, abandoned: bool) -> Array:
    """Return bool[P]: True for trajectories whose anchor is read.

    `everywhere`: that of all tokens. `guided`: the correction of stripped tokens. `abandoned`: that
    of tokens which abandoned weights sampled.
    """
    if everywhere:
        return batch.length_P > 0
    if abandoned:
        abandoned_P = np.zeros(len(batch.length_P), bool)
        abandoned_P[batch.trajectory_N[batch.abandoned_N]] = True
        return abandoned_P
    return batch.stripped_P & (guided != "behaviour")


def anchor_and_old(
    score: Scorer, model: torch.nn.Module, batch: Batch, anchored_P: Array, guided: str
) -> tuple[Array, Array]:
    """Return the anchor of the trajectories `anchored_P`, else 0, and `old` of all tokens.

    `guided` stale costs one more pass over the stripped trajectories, in the contexts that they
    were sampled in.
    """
    anchor_N = score(model, batch.part(anchored_P))
    if batch.sampled is None:
        return anchor_N, batch.mu_N
    stripped_N = batch.stripped_N
    anchor_e_N = score(model, batch.sampled.whole()) if guided == "stale" else None
    old_N = batch.mu_N.copy()
    old_N[stripped_N] = guided_old(guided, batch.mu_N[stripped_N], anchor_N[stripped_N], anchor_e_N)
    return anchor_N, old_N
