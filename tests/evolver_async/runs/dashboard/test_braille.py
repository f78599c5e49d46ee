"""Curves and bars of characters: pure functions of numbers and a size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolver_async.runs.dashboard.braille import PlotLine, bar, curve, number, trailing_mean

floats = st.floats(-1e9, 1e9) | st.just(float("nan"))


def line(*y: float, style: str = "cyan") -> PlotLine:
    return PlotLine(np.arange(len(y), dtype=float), np.array(y, dtype=float), style)


@given(st.lists(floats, max_size=40), st.integers(1, 60), st.integers(0, 20))
def test_a_curve_fills_exactly_its_cells(values: list[float], width: int, height: int) -> None:
    drawn = curve([line(*values)], width, height)
    assert len(drawn) == height
    assert all(len(row) <= width for row in drawn)


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    drawn = [row.plain for row in curve([line(0, 1)], 12, 5)]
    assert drawn == [
        "      1┤   ⡜",
        "       │  ⡜ ",
        "       │ ⡰⠁ ",
        "      0┤⡰⠁  ",
        "        0  1",
    ]


def test_a_flat_line_and_a_single_point_have_room_around_them() -> None:
    for values in ((2.0, 2.0, 2.0), (2.0,)):
        drawn = [row.plain for row in curve([line(*values)], 20, 6)]
        assert drawn[0].startswith("      3┤") and drawn[4].startswith("      1┤")
        assert any(cell > "\u2800" for cell in "".join(drawn[1:4]))


def test_bounds_that_are_always_shown_hold_the_axis() -> None:
    drawn = [row.plain for row in curve([line(0.4, 0.5)], 20, 6, within=(0.0, 1.0))]
    assert drawn[0].startswith("      1┤") and drawn[4].startswith("      0┤")


def test_the_later_line_is_on_top() -> None:
    drawn = curve([line(0, 1, style="red"), line(0, 1, style="green")], 20, 6)
    styles = {str(span.style) for row in drawn for span in row.spans}
    assert "green" in styles and "red" not in styles


def test_no_values_are_said() -> None:
    nothing = float("nan")
    assert "no values yet" in "\n".join(row.plain for row in curve([line(nothing)], 30, 6))


@given(st.lists(floats, min_size=1, max_size=30), st.integers(1, 12))
def test_the_trailing_mean_is_that_of_the_last_finite_values(
    values: list[float], window: int
) -> None:
    found = trailing_mean(np.array(values), window)
    for index in range(len(values)):
        last = [v for v in values[max(0, index + 1 - window) : index + 1] if v == v]
        if last:
            assert found[index] == pytest.approx(np.mean(last), rel=1e-6, abs=1e-3)
        else:
            assert np.isnan(found[index])


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_number_takes_at_most_seven_cells(value: float) -> None:
    assert len(number(value)) <= 7


def test_bars_have_eighths_and_what_exists_is_seen() -> None:
    assert bar(1, 2, 4) == "██  " and bar(2, 2, 4) == "████"
    assert bar(1, 16, 4) == "▎   " and bar(1, 1e6, 4) == "▏   "
    assert bar(0, 2, 4) == "    " == bar(0, 0, 4)
