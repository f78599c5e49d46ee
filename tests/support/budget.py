"""Examples of a Hypothesis test, in proportion to those of the profile that is loaded."""

from hypothesis import settings

FULL = 100  # examples of a test that names no number, in the profile `random`


def examples(count: int) -> int:
    """Return the examples to draw where the profile `random` draws `count`."""
    return max(5, count * settings.default.max_examples // FULL)
