"""Runs that no test leaves behind, of processes as a user has them."""

import os
from collections.abc import Callable, Iterator

import pytest
from launches import Launch, launching

os.environ["TEST_EXEC"] = "1"  # see forked.py


@pytest.fixture
def launch() -> Iterator[Callable[..., Launch]]:
    with launching() as start:
        yield start
