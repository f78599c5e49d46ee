"""Histograms of a step, and their rows in <run>/histograms.jsonl.

Bins lie on a fixed grid, so that those of all steps can be compared, and only the range with
values is written: {"scale", "start", "width", "counts"}. Edge i is start + i * width, or 2 to the
power of that. The learner writes the row of a step before its row of metrics.jsonl.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

HISTOGRAMS = "histograms.jsonl"
BINS = 64  # at most, of one histogram
LEAST_LOG, LARGEST_LOG = -16.0, 24.0  # powers of 2; values beyond are in the first or last bin

Array = np.ndarray


@dataclass(frozen=True)
class Histogram:
    """Counts of values in bins of one width, in the values or in their logarithms to base 2."""

    scale: Literal["linear", "log2"]
    start: float
    width: float
    counts: list[int]

    def edges(self) -> Array:
        """Return the edges of the bins, one more than there are bins."""
        edges = self.start + self.width * np.arange(len(self.counts) + 1)
        return edges if self.scale == "linear" else np.exp2(edges)

    def row(self) -> dict[str, Any]:
        """Return it as the row of a file holds it."""
        return asdict(self)


def linear(values: Array) -> Histogram | None:
    """Return a histogram with bins of 1, 2 or 5 times a power of ten; None without finite values.

    The width is the smallest with at most BINS / 2 bins. Every edge is a multiple of it.
    """
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    least = max((high - low) / (BINS / 2 - 1), abs(low) * 1e-9, abs(high) * 1e-9, 1e-9)
    power = 10.0 ** math.floor(math.log10(least))
    width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    return _counted("linear", values, width)


def integers(values: Array) -> Histogram | None:
    """Return a histogram of counts: bins of a whole number each, wider ones for a wide range."""
    if not len(values):
        return None
    spread = int(values.max() - values.min()) + 1
    width = 2.0 ** max(0, math.ceil(math.log2(spread / (BINS / 2))))
    return _counted("linear", values, width)


def logarithmic(values: Array, per_octave: int) -> Histogram | None:
    """Return a histogram with `per_octave` bins from a value to its double; None without values."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    with np.errstate(divide="ignore"):
        logs = np.clip(np.log2(np.maximum(values, 0.0)), LEAST_LOG, LARGEST_LOG)
    spread = float(logs.max() - logs.min())
    width = 1.0 / per_octave
    while spread / width > BINS - 2:
        width *= 2
    return _counted("log2", logs, width)


def _counted(scale: Literal["linear", "log2"], values: Array, width: float) -> Histogram:
    place = np.floor(values / width + 1e-9).astype(np.int64)
    first = int(place.min())
    return Histogram(scale, first * width, width, np.bincount(place - first).tolist())


def read(row: Mapping[str, Any]) -> dict[str, Histogram]:
    """Return the histograms of a row by name."""
    return {name: Histogram(**one) for name, one in row["histograms"].items()}
