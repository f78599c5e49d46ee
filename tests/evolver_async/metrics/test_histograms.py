"""Bins of histograms: every value is counted once, in a bin that holds it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from evolver_async.metrics.histograms import BINS, Histogram, integers, linear, logarithmic, read

FINITE = st.floats(-1e6, 1e6, width=32)
VALUES = arrays.arrays(np.float64, st.integers(1, 200), elements=FINITE)


def check(values: np.ndarray, found: Histogram | None, slack: float) -> None:
    """A slow count by the edges, each of which may move by `slack` bins' widths."""
    assert found is not None and 1 <= len(found.counts) <= BINS
    assert sum(found.counts) == len(values) and found.counts[0] and found.counts[-1]
    scaled = values if found.scale == "linear" else np.log2(values)
    places = (scaled - found.start) / found.width
    assert places.min() >= -slack and places.max() <= len(found.counts) + slack
    cumulative = np.cumsum(found.counts)
    for bin, count in enumerate(cumulative, 1):
        assert (places < bin - slack).sum() <= count <= (places < bin + slack).sum()
    assert read({"histograms": {"one": found.row()}}) == {"one": found}
    assert len(found.edges()) == len(found.counts) + 1 and (np.diff(found.edges()) > 0).all()


@given(VALUES)
def test_linear_bins_count_every_value_once(values: np.ndarray) -> None:
    check(values, linear(values), 1e-3)


@given(arrays.arrays(np.int64, st.integers(1, 200), elements=st.integers(0, 10**6)))
def test_bins_of_counts_are_whole_numbers(values: np.ndarray) -> None:
    found = integers(values)
    check(values, found, 1e-6)
    assert found is not None and found.width >= 1 and found.width == int(found.width)


@given(arrays.arrays(np.float64, st.integers(1, 200), elements=st.floats(2e-5, 1e7)))
def test_logarithmic_bins_count_every_value_once(values: np.ndarray) -> None:
    check(values, logarithmic(values, 4), 1e-3)


def test_values_that_have_no_place_are_counted_at_the_ends_or_left_out() -> None:
    found = logarithmic(np.array([0.0, np.inf, 1.0, np.nan]), 4)
    assert found is not None and sum(found.counts) == 3 and len(found.counts) <= BINS
    found = linear(np.array([0.0, np.inf, np.nan, 1.0]))
    assert found is not None and sum(found.counts) == 2
    assert linear(np.array([np.nan])) is None and logarithmic(np.zeros(0), 4) is None
    assert integers(np.zeros(0, np.int64)) is None


def test_the_grid_of_two_steps_is_the_same() -> None:
    one, two = (linear(np.array([low, 1.0])) for low in (0.0, 0.3))
    assert one is not None and two is not None
    assert all(np.isclose(x.start / x.width, round(x.start / x.width)) for x in (one, two))
