"""Intervals against published values and against their limits."""

import math

import pytest

from evolver_async.intervals import difference, paired, share, written


def test_a_share_has_wilsons_interval() -> None:
    assert share(0.0, 10) == pytest.approx((0.0, 0.27753), abs=1e-4)
    assert share(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=1e-3)  # Newcombe 1998
    assert share(0.5, 0) == (0.0, 1.0)
    low, high = share(1.0, 64)
    assert 0.9 < low < 1 and high == pytest.approx(1.0)


def test_a_difference_has_newcombes_interval() -> None:
    found = difference(56 / 70, 70, 48 / 80, 80)  # example (a) of Newcombe 1998, method 10
    assert found == pytest.approx((0.0524, 0.3339), abs=1e-3)
    low, high = difference(0.5, 10, 0.5, 10)
    assert low == pytest.approx(-high)


def test_pairs_of_equal_results_leave_no_doubt_and_one_pair_leaves_all() -> None:
    assert paired([0.0] * 8) == (0.0, 0.0)
    assert paired([1.0]) == (-math.inf, math.inf), "rewards have no bounds"
    low, high = paired([1.0, 0.0, 0.0, 1.0])
    assert (low + high) / 2 == pytest.approx(0.5) and low < 0
    assert written((0.25, 0.5)) == "95 % 0.25 to 0.50"
