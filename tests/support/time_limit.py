"""Time limit of every test: a test that hangs fails, by name, and the tests after it still run.

Fixtures that a test is the first to need count towards its time. Where a test does not return to
Python either, pytest's faulthandler_timeout ends the run and prints where every thread stands.

TEST_LIMIT_S=60 make test                             another limit
TEST_LIMIT_S=0 make test ARGS="-o faulthandler_timeout=0"    none, for tests that draw for hours
"""

import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

LIMIT_S = float(os.environ.get("TEST_LIMIT_S") or 600)
AGAIN_S = 5.0  # until the next attempt, where something held the failure back
LATE = pytest.StashKey[str]()  # why the test fails, if its time is over


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test and its fixtures under the limit, or under that of its `time_limit` mark."""
    mark = item.get_closest_marker("time_limit")
    limit_s = float(mark.args[0]) if mark and LIMIT_S else LIMIT_S

    def give_up(number: int, frame: FrameType | None) -> None:
        item.stash[LATE] = f"{item.nodeid} took longer than {limit_s:g} s (TEST_LIMIT_S)"
        pytest.fail(item.stash[LATE])

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that went on after its time, as something caught every failure."""
    result = yield
    if LATE in item.stash:
        pytest.fail(item.stash[LATE])
    return result
