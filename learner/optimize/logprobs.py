"""Forward passes without gradient: the log-probs that a step needs before its updates."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from evolver_async.config import Config
from evolver_async.metrics.writer import Timers
from evolver_async.model import policy
from evolver_async.schema import Array
from learner.advantage.group_relative import READS_ANCHOR
from learner.advantage.rewards import penalises
from learner.data.batch import Batch, LogProbs, MicroBatch, Minibatch
from learner.loss.correction import reads_anchor
from learner.loss.ratios import guided_old
from learner.optimize.model import Models
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
            logprobs_N[micro.index_N.numpy()] = (
                micro.each(logprobs_BT[micro.action_BT]).cpu().numpy()
            )
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


def step_logprobs(
    stage: Config,
    batch: Batch,
    score: Scorer,
    models: Models,
    timers: Timers,
    *,
    shown: bool,
    interpolates: bool,
) -> LogProbs:
    """Compute the log-probs that a step reads, by as few forward passes as possible.

    `shown`: its samples are written. `interpolates`: the anchor lies between mu and theta.
    """
    correction = stage.correction
    leans = stage.experience.reliance_coef > 0
    reads = reads_anchor(correction)
    anchored_P = anchored(
        batch,
        everywhere=shown
        or penalises(stage.loss)
        or stage.advantage.kind in READS_ANCHOR
        or (reads and not interpolates),
        guided=correction.guided,
        leans=leans,
        abandoned=reads and interpolates,
    )
    anchor_N, old_N, sampled_N = np.zeros_like(batch.mu_N), batch.mu_N, None
    if anchored_P.any():
        with timers("anchor"):
            anchor_N, old_N, sampled_N = anchor_and_old(
                score, models.model, batch, anchored_P, correction.guided, leans=leans
            )
    reference_N = np.zeros_like(batch.mu_N)
    if stage.loss.kl_coef > 0:
        assert models.reference is not None, "a stage with a KL was entered without a reference"
        with timers("reference"):
            reference_N = score(models.reference, batch.whole())
    return LogProbs(anchor_N, old_N, reference_N, sampled_N)


def anchored(batch: Batch, *, everywhere: bool, guided: str, leans: bool, abandoned: bool) -> Array:
    """Return bool[P]: True for trajectories whose anchor is read.

    `everywhere`: that of all tokens. `guided`: the correction of stripped tokens. `leans`: their
    reliance on the experience weights them. `abandoned`: that of tokens which abandoned weights
    sampled.
    """
    if everywhere:
        return batch.length_P > 0
    if abandoned:
        abandoned_P = np.zeros(len(batch.length_P), bool)
        abandoned_P[batch.trajectory_N[batch.abandoned_N]] = True
        return abandoned_P
    return batch.stripped_P & (guided != "behaviour" or leans)


def anchor_and_old(
    score: Scorer,
    model: torch.nn.Module,
    batch: Batch,
    anchored_P: Array,
    guided: str,
    *,
    leans: bool,
) -> tuple[Array, Array, Array | None]:
    """Return `anchor_N`, 0 except for the trajectories `anchored_P`, `old_N` and `sampled_N`.

    `guided` stale, or `leans`, costs one more pass over the stripped trajectories, in the contexts
    that they were sampled in.
    """
    anchor_N = score(model, batch.part(anchored_P))
    if batch.sampled is None:
        return anchor_N, batch.mu_N, None
    stripped_N = batch.stripped_N
    sampled_N = None
    if guided == "stale" or leans:
        sampled_N = np.zeros_like(batch.mu_N)
        sampled_N[stripped_N] = score(model, batch.sampled.whole())
    anchor_e_N = None if sampled_N is None else sampled_N[stripped_N]
    old_N = batch.mu_N.copy()
    old_N[stripped_N] = guided_old(guided, batch.mu_N[stripped_N], anchor_N[stripped_N], anchor_e_N)
    return anchor_N, old_N, sampled_N
