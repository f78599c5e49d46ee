"""Forward passes without gradient: the log-probs that a step needs before its updates."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from evolver_async.config import Config
from evolver_async.metrics.writer import Timers
from evolver_async.model import policy
from evolver_async.model.logit_chunks import chunk_tokens
from evolver_async.schema import Array
from learner.advantage import group_relative
from learner.advantage.shaped_rewards import penalises
from learner.data.batch import Batch, LogProbs, MicroBatch, Minibatch
from learner.data.packing import Layout
from learner.loss.correction import CORRECTIONS, facts_of
from learner.loss.ratios import guided_old
from learner.optimize.model import Models
from learner.ranks.mesh import Ranks, idle, within


@dataclass(frozen=True)
class Scorer:
    """Log-probs of ACTION tokens at a temperature.

    token_budget: tokens of one forward pass, as they are laid out; `chunk`: tokens of one chunk of
    the vocabulary projection.
    """

    temperature: float
    token_budget: int
    chunk: int
    ranks: Ranks
    layout: Layout = "padded"

    def __call__(self, model: torch.nn.Module, minibatch: Minibatch) -> Array:
        """Return log-probs under `model`, float32[N] of the batch, 0 outside of the minibatch."""
        return self._by_passes(self._logprobs, model, minibatch)

    def guessed(self, model: torch.nn.Module, minibatch: Minibatch) -> Array:
        """Return 1 for tokens that `model` finds the likeliest, else 0, as `__call__` does."""
        return self._by_passes(self._guessed, model, minibatch)

    @torch.no_grad()
    def _by_passes(
        self,
        compute: Callable[[torch.nn.Module, MicroBatch], torch.Tensor],
        model: torch.nn.Module,
        minibatch: Minibatch,
    ) -> Array:
        found_N = np.zeros_like(minibatch.batch.mu_N)
        self.ranks.plan(minibatch, self.layout, gradient=False)
        for micro in self.ranks.passes(minibatch, self.token_budget, self.layout):
            if micro is None:
                idle(model, self.ranks.device, packed=self.layout != "padded")
                continue
            of_micro_N = within(model, partial(compute, model, micro))
            found_N[micro.index_N.numpy()] = of_micro_N.cpu().numpy()
        self.ranks.sum_passes(found_N)
        return found_N

    def _guessed(self, model: torch.nn.Module, micro: MicroBatch) -> torch.Tensor:
        _, head = policy.split_model(model)
        assert isinstance(head, torch.nn.Linear)
        hidden_QD = self._hidden(model, micro)
        chunk = chunk_tokens(self.chunk, head.out_features, gpu=hidden_QD.is_cuda)
        best_Q = torch.cat([head(hidden_CD).argmax(-1) for hidden_CD in hidden_QD.split(chunk)])
        return (best_Q == micro.target_Q).float().index_select(0, micro.prediction_N)

    def _hidden(self, model: torch.nn.Module, micro: MicroBatch) -> torch.Tensor:
        hidden_KD = policy.hidden_states(model, micro.tokens_BT, micro.borders, micro.read_K)
        return hidden_KD.index_select(0, micro.source_Q)

    def _logprobs(self, model: torch.nn.Module, micro: MicroBatch) -> torch.Tensor:
        hidden_QD = self._hidden(model, micro)
        found = policy.target_logprobs(
            model,
            hidden_QD,
            micro.target_Q,
            self.temperature,
            self.chunk,
            masks=micro.masks_Q,
            context=micro.context,
        )
        return found[0].index_select(0, micro.prediction_N)


def step_logprobs(
    stage: Config,
    batch: Batch,
    score: Scorer,
    models: Models,
    timers: Timers,
    *,
    take: int,
    interpolates: bool,
    late: bool,
) -> LogProbs:
    """Compute the log-probs that a step reads, by as few forward passes as possible.

    `interpolates`: the anchor lies between mu and theta. `late`: it is left to `late_anchor`.
    """
    correction = stage.correction
    leans = stage.experience.reliance_coef > 0
    reads = facts_of(correction).reads_anchor
    anchored_P = anchored(
        batch,
        everywhere=shown(stage, take)
        or penalises(stage.loss)
        or group_relative.facts_of(stage.advantage).reads_anchor
        or (reads and not interpolates),
        guided=correction.guided,
        leans=leans,
        abandoned=(reads and interpolates) or math.isfinite(stage.loss.target_kl),
    )
    anchor_N, old_N, sampled_N = np.zeros_like(batch.mu_N), batch.mu_N, None
    if anchored_P.any() and not late:
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


def shown(stage: Config, take: int) -> bool:
    """Return True if the samples of a take are written."""
    return stage.metrics.samples > 0 and take % stage.metrics.samples_every == 0


def comes_late(stage: Config, batch: Batch, interpolates: bool) -> bool:
    """Return True if only the loss reads the anchor, so that the first update can give that of its
    tokens.

    This depends on settings and data alone, so it is the same for a repeated take.
    """
    correction = CORRECTIONS.of(stage.correction.kind)
    return (
        facts_of(stage.correction).reads_anchor
        and getattr(correction, "prepare", None) is None
        and not interpolates
        and batch.sampled is None
        and stage.experience.reliance_coef == 0
        and not penalises(stage.loss)
        and not group_relative.facts_of(stage.advantage).reads_anchor
    )


def late_anchor(
    stage: Config,
    score: Scorer,
    model: torch.nn.Module,
    logprobs: LogProbs,
    trained: Minibatch,
    first: Minibatch,
    take: int,
) -> LogProbs:
    """Score the anchor of the tokens that train after the first update, under the weights before
    it.

    For samples the other tokens are scored too, by a pass of their own: no bit of this one changes.
    """
    batch = trained.batch
    fresh_P, later_P = np.zeros((2, len(batch.length_P)), bool)
    fresh_P[first.members], later_P[trained.members] = True, True
    later_P &= ~fresh_P
    anchor_N = score(model, batch.part(later_P))
    if shown(stage, take):
        anchor_N += score(model, batch.part(~later_P))
    return replace(logprobs, anchor_N=anchor_N, fresh_N=fresh_P[batch.trajectory_N])


def anchored(batch: Batch, *, everywhere: bool, guided: str, leans: bool, abandoned: bool) -> Array:
    """Return bool[P]: True for trajectories whose anchor is read.

    `everywhere`: that of all tokens. `guided`: the correction of stripped tokens. `leans`: their
    reliance on the experience weights them. `abandoned`: that of tokens which abandoned weights
    sampled.
    """
    if everywhere:
        return batch.length_P > 0
    read_P = batch.stripped_P & (guided != "behaviour" or leans)
    if abandoned:
        read_P[batch.trajectory_N[batch.abandoned_N]] = True
        read_P &= ~batch.written_P
    return read_P


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
