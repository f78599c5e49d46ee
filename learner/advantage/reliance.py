"""Weights of stripped trajectories by their reliance on the experience that they lost. Pure.

HiLL, arXiv 2604.00698, measures how much a hinted answer leans on its hint by the mean over its
tokens of log p(token | hint) - log p(token), and weights the reward of the hint's author by
exp(-reliance / 0.3). Here the answer itself is weighted: what the policy could nearly have written
without experience trains the more.
"""

from dataclasses import replace

import numpy as np

from evolver_async.schema import Array
from learner.advantage.assign import Advantages
from learner.data.batch import Batch, LogProbs


def reliance(batch: Batch, logprobs: LogProbs) -> Array:
    """Return max(0, mean_t(guided_t - bare_t)) of log-probs by trajectory, 0 if not stripped.

    Both are of the policy that the step begins with. float64[P].
    """
    assert logprobs.sampled_N is not None, "the sampled contexts were not scored"
    lost_N = np.where(batch.stripped_N, logprobs.sampled_N - logprobs.anchor_N, 0.0)
    sums_P = np.bincount(batch.trajectory_N, weights=lost_N, minlength=len(batch.length_P))
    return np.maximum(0.0, sums_P / np.maximum(batch.length_P, 1))


def weighted(
    advantages: Advantages, batch: Batch, logprobs: LogProbs, *, coef: float
) -> Advantages:
    """Multiply the advantages of stripped trajectories by exp(-coef · reliance); measure it.

    `experience/reliance` is the mean over stripped trajectories. Without the log-probs of the
    contexts that they were sampled in, nothing changes; `coef` > 0 needs them.
    """
    trained_P = batch.stripped_P & (batch.length_P > 0)
    if logprobs.sampled_N is None or not trained_P.any():
        return advantages
    reliance_P = reliance(batch, logprobs)
    weight_N = np.exp(-coef * reliance_P)[batch.trajectory_N].astype(np.float32)
    return replace(
        advantages,
        advantage_N=advantages.advantage_N * weight_N if coef else advantages.advantage_N,
        metrics=advantages.metrics | {"experience/reliance": float(reliance_P[trained_P].mean())},
    )
