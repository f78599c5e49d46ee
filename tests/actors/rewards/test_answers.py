"""Equality of replies and answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rewards import answers

SAME_NUMBERS = [
    ("1/2", "0.5"),
    ("1,000", "1000"),
    ("$12$", "12"),
    ("72 + 25 = 97.", "97"),
    ("x = -3", "-3"),
    ("5-3", "3"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    ("1,2,3", "3"),
    ("about $1,234.50 in all", "1234.5"),
    ("it is \u22123", "-3"),
    ("15", "7 + 8\n#### 15"),
    ("3e2", "300"),
    (".5", "1/2"),
    ("72 km", "72"),
]
# equal pairs of mathematics: 12 of 13 are found
PAIRS = [
    ("1/2", "0.5"),
    ("$\\frac{1}{2}$", "1/2"),
    ("1,000", "1000"),
    ("$12$", "12"),
    ("\\boxed{7}", "7"),
    ("$x^2 + 2x + 1$", "(x+1)^2"),
    ("$\\sqrt{8}$", "2\\sqrt{2}"),
    ("$\\{1, 2, 3\\}$", "\\{3, 2, 1\\}"),
    ("$(1, 2)$", "(1,2)"),
    ("50\\%", "50\\%"),
    ("The answer is $\\frac{3}{4}$.", "0.75"),
    ("$2^{10}$", "1024"),
    ("$x = 5$", "5"),
]


@pytest.mark.parametrize(("reply", "answer"), SAME_NUMBERS)
def test_the_last_number_is_compared_as_a_number(reply: str, answer: str) -> None:
    assert answers.number(reply, answer) == 1.0
    assert answers.number(f"{reply} or 123456", answer) == 0.0


@pytest.mark.parametrize("reply", ["", "none", "1/0", "9" * 500, "97 or 98"])
def test_a_reply_without_the_number_is_wrong(reply: str) -> None:
    assert answers.number(reply, "97") == 0.0


def test_a_tolerance_is_relative() -> None:
    assert answers.number("3.14", "3.14159") == 0.0
    assert answers.number("3.14", "3.14159", tolerance=1e-3) == 1.0
    assert answers.number("90", "100", tolerance=0.1) == 1.0
    assert answers.number("100", "90", tolerance=0.1) == 0.0, "it is that of the answer"


@given(st.text(max_size=60))
def test_any_text_has_a_last_number_or_none(text: str) -> None:
    found = answers.last_number(text)
    assert (found is not None) <= any(map(str.isdigit, text))


@given(st.integers(-(10**12), 10**12))
def test_a_number_equals_itself_in_any_grouping(value: int) -> None:
    assert answers.number(f"that makes {value:,}.", str(value)) == 1.0


def test_exact_ignores_white_space_alone() -> None:
    assert answers.exact(" Paris\n", "Paris") == 1.0
    assert answers.exact("paris", "Paris") == 0.0
    assert answers.exact("paris", "Paris", ignore_case=True) == 1.0


def test_a_pattern_is_searched_or_matched_in_full() -> None:
    assert answers.regex("a <b>1</b>", pattern="<b>.*</b>") == 1.0
    assert answers.regex("a <b>1</b>", pattern="<b>.*</b>", full=True) == 0.0


def test_math_verify_finds_twelve_of_thirteen_equal_pairs_and_no_unequal_one() -> None:
    found = [pair for pair in PAIRS if answers.math(*pair)]
    assert len(found) >= 12, [pair for pair in PAIRS if pair not in found]
    for reply, answer in (("1/2", "0.25"), ("$x^2$", "x^3"), ("nothing", "5"), ("7", "")):
        assert answers.math(reply, answer) == 0.0, (reply, answer)
