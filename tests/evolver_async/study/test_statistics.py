"""Statistics against numbers that were computed by hand or taken from tables."""

import math

import pytest

from evolver_async.study.statistics import (
    area,
    equivalence,
    first_reach,
    interval,
    mean_by_seed,
    paired,
    reach,
    weighted_mean,
)
from evolver_async.study.summary import shown


def test_an_interval_uses_students_quantile() -> None:
    # std of 1, 2, 3 is 1; the table has t(.975, 2) = 4.3027
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.count == 3
    assert found.half == pytest.approx(4.302653 / math.sqrt(3), abs=1e-5)
    # t(.975, 4) = 2.7764; the variance of 0, 0, 0, 0, 1 is .2
    assert interval([0, 0, 0, 0, 1]).half == pytest.approx(2.776445 * math.sqrt(0.2 / 5), abs=1e-5)
    # t(.95, 1) = 6.3138
    found = interval([0.0, 1.0], confidence=0.9)
    assert found.half == pytest.approx(6.313752 * 0.5, abs=1e-5)


def test_one_value_has_no_interval_and_none_has_no_mean() -> None:
    one = interval([0.25])
    assert (one.mean, one.half, one.low, one.high, one.count) == (0.25, None, None, None, 1)
    assert math.isnan(interval([]).mean) and interval([]).half is None


def test_the_part_of_an_interval_beyond_what_a_mean_can_be_is_cut_off() -> None:
    whole, cut = interval([0.6, 1.0]), interval([0.6, 1.0], bounds=(0.0, 1.0))
    assert whole.low == pytest.approx(0.8 - 12.7062 * 0.2, abs=1e-4) and not whole.is_cut
    assert (cut.mean, cut.low, cut.high, cut.is_cut) == (0.8, 0.0, 1.0, True)
    assert shown(cut) == "0.800 (0.000 to 1.000)"
    inside = interval([0.5, 0.51, 0.52], bounds=(0.0, 1.0))
    assert not inside.is_cut and shown(inside) == f"0.510 ± {inside.half:.3f}"
    edge = interval([1.0, 1.0], bounds=(0.0, 1.0))
    assert not edge.is_cut and (edge.low, edge.high) == (1.0, 1.0)


def test_a_mean_by_seed_is_of_the_seeds_that_all_samples_have() -> None:
    found = mean_by_seed([{2: 1.0, 0: 0.5, 1: 0.0}, {0: 0.1, 2: 0.0}])
    assert found == pytest.approx({0: 0.3, 2: 0.5}) and [*found] == [0, 2]
    assert mean_by_seed([]) == {}


def test_differences_are_paired_by_seed() -> None:
    differences = paired({3: 0.5, 0: 0.9, 2: 0.1}, {0: 0.4, 1: 0.0, 2: 0.2})
    assert differences == pytest.approx({0: 0.5, 2: -0.1})


def test_pairs_of_a_common_offset_differ_by_it_alone() -> None:
    baseline = {seed: seed / 7 for seed in range(5)}
    differences = paired({seed: value + 0.1 for seed, value in baseline.items()}, baseline)
    found = interval([*differences.values()])
    assert found.mean == pytest.approx(0.1) and found.half == pytest.approx(0.0, abs=1e-12)


def test_equivalence_is_the_larger_of_two_one_sided_p_values() -> None:
    # mean 0, std .01, n = 4, error .005, margin .02: t = 4 on both sides; P(T_3 > 4) = .01400
    spread = 0.01 * math.sqrt(3 / 4)
    differences = [spread, -spread, spread, -spread]
    assert equivalence(differences, 0.02) == pytest.approx(0.014004, abs=1e-5)
    # the mean at the margin: t = 0 on that side
    assert equivalence([d + 0.02 for d in differences], 0.02) == pytest.approx(0.5)
    assert equivalence([d - 0.02 for d in differences], 0.02) == pytest.approx(0.5)
    # one degree of freedom is the Cauchy distribution: P(T > 1) = 1/4
    assert equivalence([0.0, 0.2], 0.2) == pytest.approx(0.25)


def test_equivalence_at_the_edges() -> None:
    assert equivalence([0.1], 1.0) is None
    assert equivalence([0.0, 0.0], 0.05) == 0.0
    assert equivalence([0.05, 0.05], 0.05) == 1.0


def test_a_threshold_is_reached_first() -> None:
    curve = [(0, 0.1), (10, 0.8), (20, 0.5), (30, 0.9)]
    assert first_reach(curve, 0.8) == 10
    assert first_reach(curve, 0.85) == 30
    assert first_reach(curve, 0.95) is None
    assert first_reach([], 0.5) is None


def test_censored_runs_are_counted() -> None:
    assert reach([10, None, 30]) == ((10, 30), 1)
    assert reach([None]) == ((), 1)


def test_an_area_is_the_mean_height_by_trapezoids() -> None:
    assert area([(0, 0.0), (10, 1.0), (30, 1.0)]) == pytest.approx((5 + 20) / 30)
    assert area([(0, 0.0), (5, 0.5), (10, 1.0)]) == area([(0, 0.0), (10, 1.0)]) == 0.5
    assert area([(4, 0.7)]) == 0.7
    assert area([]) is None


def test_weights_weigh() -> None:
    assert weighted_mean([(1.0, 1.0), (4.0, 3.0)]) == 3.25
    assert weighted_mean([]) is None


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_value_that_is_no_number_is_told_and_ends_no_summary(odd: float) -> None:
    found = interval([odd, 1.0, 2.0])
    assert math.isnan(found.mean) and found.half is None and found.count == 3
    assert shown(found) == "not a number"
    assert equivalence([odd, 0.1], 0.5) is None
