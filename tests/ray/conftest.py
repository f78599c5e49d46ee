"""Runs that no test leaves behind."""

from collections.abc import Callable, Iterator

import pytest
from launches import Launch, launching


@pytest.fixture
def launch() -> Iterator[Callable[..., Launch]]:
    with launching() as start:
        yield start
