"""Statistics of a study, as pure functions of numbers.

A run that does not reach a threshold is censored: it has no time to it, and no mean leaves it out
silently.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean, stdev
from typing import NamedTuple

import mpmath

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """Mean of a sample with the half width of its confidence interval.

    `half` is None for a sample of one, `mean` is nan for an empty one.
    """

    mean: float
    half: float | None
    count: int


class Reach(NamedTuple):
    """Amounts (steps, seconds) at which runs reached a threshold, and how many runs did not."""

    amounts: tuple[float, ...]
    censored: int


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the mean and its interval by Student's t distribution with n - 1 degrees."""
    count = len(values)
    if count == 0 or not all(map(math.isfinite, values)):
        return Interval(math.nan, None, count)
    if count == 1:
        return Interval(values[0], None, 1)
    quantile = _student_quantile((1 - confidence) / 2, count - 1)
    return Interval(fmean(values), quantile * stdev(values) / math.sqrt(count), count)


def _student_tail(value: float, degrees: int) -> float:
    """Return the probability that a variable of Student's t distribution is above `value`."""
    if math.isnan(value):
        raise ValueError("the value of a test must be a number, is nan")
    square = value * value
    outside = mpmath.betainc(degrees / 2, 0.5, 0, degrees / (degrees + square), regularized=True)
    return float(outside / 2 if value >= 0 else 1 - outside / 2)


@cache
def _student_quantile(tail: float, degrees: int) -> float:
    """Return the value that Student's t distribution exceeds with probability `tail` below 0.5."""
    high = 1.0
    while _student_tail(high, degrees) > tail:
        high *= 2
    return float(
        mpmath.findroot(
            lambda value: _student_tail(value, degrees) - tail,
            (0.0, 2 * high),
            solver="bisect",
            maxsteps=200,
            tol=1e-26,
        )
    )


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """Return `values - baseline` over the seeds that both have, in the order of the seeds."""
    return [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]


def equivalence(differences: Sequence[float], margin: float) -> float | None:
    """Return the p-value of two one-sided t tests (TOST; Schuirmann 1987), None below two values
    and with one that is not finite.

    Below .05, the mean difference lies within (-margin, margin) at that level.
    """
    count = len(differences)
    if count < 2 or not all(map(math.isfinite, differences)):
        return None
    mean, error = fmean(differences), stdev(differences) / math.sqrt(count)
    if error == 0:
        return 0.0 if abs(mean) < margin else 1.0
    above = _student_tail((mean + margin) / error, count - 1)  # H0: mean <= -margin
    below = _student_tail((margin - mean) / error, count - 1)  # H0: mean >= margin
    return max(above, below)


def first_reach(curve: Sequence[tuple[float, float]], threshold: float) -> float | None:
    """Return the first amount at which a curve of (amount, value) reaches a threshold, or None."""
    return next((amount for amount, value in curve if value >= threshold), None)


def reach(firsts: Sequence[float | None]) -> Reach:
    """Separate the runs that reached a threshold from the censored ones."""
    amounts = tuple(first for first in firsts if first is not None)
    return Reach(amounts, len(firsts) - len(amounts))


def area(curve: Sequence[tuple[float, float]]) -> float | None:
    """Return the mean height of a curve by the trapezoidal rule; None for an empty curve."""
    if not curve:
        return None
    width = curve[-1][0] - curve[0][0]
    if width <= 0:
        return curve[-1][1]
    pairs = itertools.pairwise(curve)
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairs) / width


def weighted_mean(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the mean of (value, weight) pairs; None without weight."""
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total > 0 else None
