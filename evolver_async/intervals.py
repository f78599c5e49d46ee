"""Confidence intervals of shares and of their differences, at 95 %. Pure."""

import math
from collections.abc import Sequence

Z = 1.959963984540054  # quantile of the normal distribution at 97.5 %


def share(value: float, count: float) -> tuple[float, float]:
    """Return the bounds of a share of `count` independent trials (Wilson's score interval)."""
    if count <= 0:
        return 0.0, 1.0
    square = Z * Z / count
    middle = (value + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(value * (1 - value) / count + square / count / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def difference(
    value: float, count: float, before: float, count_before: float
) -> tuple[float, float]:
    """Return the bounds of value - before, shares of two independent samples (Newcombe 1998)."""
    low, high = share(value, count)
    low_before, high_before = share(before, count_before)
    return (
        value - before - math.hypot(value - low, high_before - before),
        value - before + math.hypot(high - value, before - low_before),
    )


def paired(differences: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the mean of differences between two results of the same tasks.

    One task bounds nothing.
    """
    count = len(differences)
    mean = math.fsum(differences) / count
    if count < 2:
        return -math.inf, math.inf
    variance = math.fsum((one - mean) ** 2 for one in differences) / (count - 1)
    half = Z * math.sqrt(variance / count)
    return mean - half, mean + half


def written(bounds: tuple[float, float], signed: bool = False) -> str:
    """Write bounds for people, as in `95 % 0.40 to 0.60`."""
    low, high = (f"{bound:+.2f}" if signed else f"{bound:.2f}" for bound in bounds)
    return f"95 % {low} to {high}"
