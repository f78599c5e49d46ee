"""The type of the fixture that keeps a measurement."""

from collections.abc import Callable

Figure = Callable[[str, float, str], None]
