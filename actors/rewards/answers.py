"""Equality of a reply and an answer: as text, as a number, as mathematics, by a pattern. Pure."""

import re
from fractions import Fraction

MOST_DIGITS = 60
_SIGN = r"(?:(?<![\w.)])[-+])?"
_PLAIN = r"(?:(?<![\w.])\d{1,3}(?:,\d{3})+(?![\d,]*\d)|(?<![\d.])\d+)(?:\.\d+)?|(?<![\w.])\.\d+"
NUMBER = re.compile(
    rf"{_SIGN}\$?(?:{_PLAIN})(?:[eE][-+]?\d{{1,3}})?(?:\s?/\s?\d+(?:\.\d+)?(?![\d/]))?"
)
FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


def exact(reply: str, answer: str, *, ignore_case: bool = False) -> float:
    """Return 1 if both are the same text, whatever the white space, else 0."""
    one, other = (" ".join(text.split()) for text in (reply, answer))
    return float(one.lower() == other.lower() if ignore_case else one == other)


def number(reply: str, answer: str, *, tolerance: float = 0.0) -> float:
    """Return 1 if the last numbers of both are equal, within a relative `tolerance`, else 0."""
    given, wanted = last_number(reply), last_number(answer)
    if given is None or wanted is None:
        return 0.0
    return float(abs(given - wanted) <= abs(wanted) * Fraction(tolerance))


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text: `1,000`, `$12$`, `-1.5`, `1/2`, `\\frac{1}{2}`, `3e8`."""
    text = FRACTION.sub(r" \1/\2 ", text.replace("−", "-").replace("\\!", "").replace("{,}", ","))
    found = [match[0] for match in NUMBER.finditer(text)]
    if not found or len(found[-1]) > MOST_DIGITS:
        return None
    whole, _, divisor = re.sub(r"[\s,$]", "", found[-1]).partition("/")
    value = Fraction(whole)
    if divisor:
        return value / Fraction(divisor) if Fraction(divisor) else None
    return value


def math(reply: str, answer: str) -> float:
    """Return 1 if math-verify finds both equal, else 0.

    Its timeouts use signals, which only a main thread can; the caller ends what takes too long.
    """
    from math_verify import parse, verify

    def read(text: str) -> list:
        return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    gold = read(answer if "$" in answer or "\\boxed" in answer else f"${answer}$") or read(answer)
    given = read(reply)
    return float(bool(gold and given and verify(gold, given, timeout_seconds=None)))


def regex(text: str, *, pattern: str, full: bool = False) -> float:
    """Return 1 if the pattern is found in the text, with `full` if it matches all of it, else 0."""
    found = re.compile(pattern, re.DOTALL)
    return float((found.fullmatch(text) if full else found.search(text)) is not None)
