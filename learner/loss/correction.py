"""Off-policy corrections: how stale tokens are weighted and which ratio the clipped loss bounds.

Pure functions of per-token log-probs; formulas and letters: docs/algorithms.md, Corrections.
All vectors are over the N ACTION tokens of whole trajectories, so trajectory-level weights see all
their tokens. Every kind yields a ratio and a weight, so that the loss is the same for all. `old`,
from which the data is corrected, is mu, except for tokens whose context lost its experience
(`guided_old`).

A user's correction is a function like the ones here, named as `correction.kind=module:function`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from evolver_async.config import CorrectionConfig
from evolver_async.config.values.kinds import CorrectionKind
from evolver_async.extension import Builtins
from evolver_async.schema import Array
from learner.loss.ratios import LOG_RATIO_BOUND, bounded_exp, trajectory_mean, trajectory_sum


@dataclass(frozen=True)
class ActionTokens:
    """Tokens of one micro-batch, as a correction sees them.

    theta_N carries the gradient; old_N and anchor_N are constants, trajectory_N int64[N] is the
    trajectory of each token. anchor_N is 0 for the kinds that read no anchor. prepared_N: what the
    kind's `prepare` returned for these tokens, 1 without one. lag_N int64: versions between the
    token's sampling and this step, -1 of a log's tokens. position_N int64: its place among the
    ACTION tokens of its trajectory, from 0. group_N int64: index of its group, the same in all
    micro-batches of a step.
    """

    theta_N: torch.Tensor
    old_N: torch.Tensor
    anchor_N: torch.Tensor
    advantage_N: torch.Tensor
    trajectory_N: torch.Tensor
    prepared_N: torch.Tensor
    lag_N: torch.Tensor
    position_N: torch.Tensor
    group_N: torch.Tensor


@dataclass(frozen=True)
class StepTokens:
    """ACTION tokens of a whole step, as the `prepare` of a correction sees them: NumPy arrays.

    As in `ActionTokens`, but trajectory_N numbers the trajectories of the step, not those of a
    micro-batch.
    """

    old_N: Array
    anchor_N: Array
    advantage_N: Array
    trajectory_N: Array
    lag_N: Array
    position_N: Array
    group_N: Array


@dataclass(frozen=True)
class Corrected:
    """Ratio and weight of every token for the loss, and constants for the log.

    The objective of a token is weight_N L(x) with the clipped L and x = ratio_N, or, of a kind that
    does not clip, weight_N A ratio_N, whose ratio_N may be theta itself. ratio_N is differentiable,
    weight_N constant. w_N = exp(anchor - old), r_N = exp(theta - anchor): constants, per token and
    untruncated whatever the kind does with them (kinds without an anchor: w = r = q). `metrics`:
    numbers of the kind's own to log, one a token, nan for tokens that have none: their means are
    offpolicy/own/<name>, and lag_<bucket>/own/<name> by version lag.
    """

    ratio_N: torch.Tensor
    weight_N: torch.Tensor
    w_N: torch.Tensor
    r_N: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


Correction = Callable[[ActionTokens, CorrectionConfig], Corrected]
Prepare = Callable[[StepTokens, CorrectionConfig], Array]  # to float32[N]
C = TypeVar("C", bound=Correction)
CORRECTIONS: Builtins[Correction] = Builtins("correction.kind")


def correction(
    *,
    reads_anchor: bool = True,
    clips: bool = True,
    scales_lr: bool = False,
    prepare: Prepare | None = None,
) -> Callable[[C], C]:
    """Declare a correction of one's own in the words of `CorrectionKind`; these are its defaults.

    prepare: computes a number a token over the whole step, before its first update.
    """
    facts = CorrectionKind(reads_anchor=reads_anchor, clips=clips, scales_lr=scales_lr)

    def declare(function: C) -> C:
        vars(function).update(facts=facts, prepare=prepare)
        return function

    return declare


def facts_of(settings: CorrectionConfig) -> CorrectionKind:
    """Return the declaration of the kind, also of one's own."""
    return getattr(CORRECTIONS.of(settings.kind), "facts", settings.facts)


def _anchored(tokens: ActionTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Return r = exp(theta - anchor), with gradient, and w = exp(anchor - old)."""
    return bounded_exp(tokens.theta_N - tokens.anchor_N), bounded_exp(
        tokens.anchor_N - tokens.old_N
    )


def _within(x_N: torch.Tensor, settings: CorrectionConfig) -> torch.Tensor:
    """Return 1 where low <= x <= high, else 0: masked tokens stay in every denominator."""
    return ((x_N >= settings.low) & (x_N <= settings.high)).to(x_N.dtype)


@CORRECTIONS("none")
def none(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """L(r): no weight for the age of the data."""
    ratio_N, w_N = _anchored(tokens)
    return Corrected(ratio_N, torch.ones_like(w_N), w_N, ratio_N.detach())


@CORRECTIONS("ppo")
def ppo(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """L(q), q = exp(theta - old)."""
    ratio_N = bounded_exp(tokens.theta_N - tokens.old_N)
    q_N = ratio_N.detach()
    return Corrected(ratio_N, torch.ones_like(q_N), q_N, q_N)


@CORRECTIONS("decoupled")
def decoupled(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """min(w, w_max) L(r); at `level: trajectory` with W, the product of w over the trajectory."""
    ratio_N, w_N = _anchored(tokens)
    whole_N = w_N
    if settings.level == "trajectory":
        log_w_N = tokens.anchor_N - tokens.old_N
        whole_N = bounded_exp(trajectory_sum(log_w_N, tokens.trajectory_N))
    return Corrected(ratio_N, whole_N.clamp(max=settings.w_max), w_N, ratio_N.detach())


@CORRECTIONS("icepop")
def icepop(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """1[low <= w <= high] w L(r)."""
    ratio_N, w_N = _anchored(tokens)
    return Corrected(ratio_N, w_N * _within(w_N, settings), w_N, ratio_N.detach())


@CORRECTIONS("geo_mask")
def geo_mask(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """1[low <= W^(1/n) <= high] L(r), with W over the n tokens of the trajectory."""
    ratio_N, w_N = _anchored(tokens)
    mean_N = bounded_exp(trajectory_mean(tokens.anchor_N - tokens.old_N, tokens.trajectory_N))
    return Corrected(ratio_N, _within(mean_N, settings), w_N, ratio_N.detach())


@CORRECTIONS("gspo")
def gspo(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """min(W^(1/n), w_max) L(s_t), s_t = sg(s) exp(theta - sg theta), s = exp(mean(theta - anchor)).

    GSPO, arXiv 2507.18071, its token-level form, with a weight for the age of the data.
    """
    ratio_N, w_N = _anchored(tokens)
    mean_N = bounded_exp(trajectory_mean(tokens.anchor_N - tokens.old_N, tokens.trajectory_N))
    log_r_N = (tokens.theta_N - tokens.anchor_N).detach()
    s_N = bounded_exp(trajectory_mean(log_r_N, tokens.trajectory_N))
    s_N = s_N * (tokens.theta_N - tokens.theta_N.detach()).exp()
    return Corrected(s_N, mean_N.clamp(max=settings.w_max), w_N, ratio_N.detach())


@CORRECTIONS("cispo")
def cispo(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """sg min(q, 1 + epsilon) A theta."""
    q_N = bounded_exp(tokens.theta_N - tokens.old_N).detach()
    weight_N = q_N.clamp(max=1 + settings.epsilon)
    return Corrected(tokens.theta_N, weight_N, q_N, q_N)


@CORRECTIONS("topr")
def topr(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """A theta where A > 0, else sg min(q, 1) A theta.

    At `level: trajectory` with Q, the product of q over the trajectory.
    """
    q_N = bounded_exp(tokens.theta_N - tokens.old_N).detach()
    whole_N = _whole(tokens) if settings.level == "trajectory" else q_N
    weight_N = torch.where(tokens.advantage_N > 0, torch.ones_like(q_N), whole_N.clamp(max=1))
    return Corrected(tokens.theta_N, weight_N, q_N, q_N)


@CORRECTIONS("vcpo")
def vcpo(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """sg min(Q, w_max) A theta; the learning rate is scaled by sqrt(ESS / B) of the untruncated Q.

    VCPO, arXiv 2602.17616. Its off-policy optimal baseline is `advantage.kind: opob`.
    """
    q_N = bounded_exp(tokens.theta_N - tokens.old_N).detach()
    return Corrected(tokens.theta_N, _whole(tokens).clamp(max=settings.w_max), q_N, q_N)


def kept_by_second_moment(tokens: StepTokens, settings: CorrectionConfig) -> Array:
    """Return 1 for the tokens that train, 0 for the outliers among those that a clip could hold.

    Only tokens with A > 0 and w > 1, or A < 0 and w < 1, can be left out: the largest (log w)²
    first, until the mean of (log w)² over the others of these is at most `second_moment`.
    """
    log_w_N = np.clip(tokens.anchor_N - tokens.old_N, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    log_w_N = log_w_N.astype(np.float64)
    held_N = np.flatnonzero(log_w_N * tokens.advantage_N > 0)
    moment_N = log_w_N[held_N] ** 2
    order = np.argsort(moment_N, kind="stable")
    means = np.cumsum(moment_N[order]) / np.arange(1, len(order) + 1)
    keeps = int(np.searchsorted(means, settings.second_moment, side="right"))
    kept_N = np.ones_like(tokens.old_N)
    kept_N[held_N[order[keeps:]]] = 0.0
    return kept_N


@CORRECTIONS("m2po", prepare=kept_by_second_moment)
def m2po(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """sg min(q, w_max) A theta, without the tokens that `kept_by_second_moment` leaves out.

    M2PO, arXiv 2510.01161, algorithm 1, whose q has no bound; the second moment is that of the
    weights before the step, so it is one mask for all its minibatches. Masked tokens stay in every
    denominator.
    """
    ratio_N, w_N = _anchored(tokens)
    weight_N = _truncated(tokens, settings) * tokens.prepared_N
    return Corrected(tokens.theta_N, weight_N, w_N, ratio_N.detach())


@CORRECTIONS("dppo_tv")
def dppo_tv(tokens: ActionTokens, settings: CorrectionConfig) -> Corrected:
    """M sg min(q, w_max) A theta; M is 0 where A (p - b) > 0 and |p - b| > divergence.

    p = exp theta, b = exp old. DPPO with total variation, arXiv 2602.04879, equations 11 to 13: the
    divergence of the sampled token's probability takes the place of the ratio's clip. A token that
    was unlikely stays within it whatever its ratio, so that is truncated, as by verl
    (`compute_policy_loss_dppo_tv`, core_algos.py).
    """
    q_N = bounded_exp(tokens.theta_N - tokens.old_N).detach()
    change_N = tokens.theta_N.detach().exp() - tokens.old_N.exp()
    masked_N = (change_N * tokens.advantage_N > 0) & (change_N.abs() > settings.divergence)
    weight_N = _truncated(tokens, settings).masked_fill(masked_N, 0.0)
    return Corrected(tokens.theta_N, weight_N, q_N, q_N)


def _truncated(tokens: ActionTokens, settings: CorrectionConfig) -> torch.Tensor:
    """Return min(q, w_max) with q = exp(theta - old), a constant."""
    return bounded_exp(tokens.theta_N - tokens.old_N).detach().clamp(max=settings.w_max)


def _whole(tokens: ActionTokens) -> torch.Tensor:
    """Return at every token Q, the product of q = exp(theta - old) over its trajectory."""
    log_q_N = (tokens.theta_N - tokens.old_N).detach()
    return bounded_exp(trajectory_sum(log_q_N, tokens.trajectory_N))
