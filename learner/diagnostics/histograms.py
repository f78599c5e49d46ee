"""Histograms of one step: importance weights and ratios of tokens, lags, rewards, lengths. Pure."""

from evolver_async.metrics.histograms import Histogram, integers, linear, logarithmic
from evolver_async.schema import Array
from learner.data.batch import Batch
from learner.loss.accounting import Accounting

PER_OCTAVE = 4  # bins from a weight or a ratio to its double
LENGTHS_PER_OCTAVE = 2


def step_histograms(
    batch: Batch, kept_P: Array, accounting: Accounting | None = None
) -> dict[str, Histogram]:
    """Return the histograms of the trajectories `kept_P` and of the tokens of `accounting`.

    weights, ratios: of ACTION tokens, anchor over behaviour and policy over anchor. lags, rewards,
    lengths: of trajectories; lags in versions, lengths in ACTION tokens.
    """
    found = {
        "rewards": linear(batch.reward_P[kept_P]),
        "lengths": logarithmic(batch.length_P[kept_P], LENGTHS_PER_OCTAVE),
    }
    if accounting is not None:
        found["lags"] = integers(batch.lag_P[kept_P])
        found["weights"] = logarithmic(accounting.column("w"), PER_OCTAVE)
        found["ratios"] = logarithmic(accounting.column("r"), PER_OCTAVE)
    return {name: one for name, one in found.items() if one is not None}
