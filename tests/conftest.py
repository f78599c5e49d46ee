"""How Hypothesis draws: the same examples every time, however slow the machine, so that a red run
speaks of the change it ran on. The time limit of every test is in `time_limit.py`,
the mark of tests that start processes in `process_mark.py`.

make test ARGS=--hypothesis-profile=random    draws anew, and two and a half times as often
"""

import gc

import pytest
from hypothesis import HealthCheck, settings
from process_mark import (
    pytest_collection_modifyitems,
    pytest_runtest_call,
    pytest_runtest_setup,
)
from time_limit import pytest_runtest_protocol

gc.disable()  # while the tests are collected, which imports all of the product


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Let the garbage collector look at what the tests make, and at nothing before."""
    gc.freeze()
    gc.enable()


# the hooks
__all__ = [
    "pytest_collection_modifyitems",
    "pytest_runtest_call",
    "pytest_runtest_protocol",
    "pytest_runtest_setup",
    "pytest_runtestloop",
]

settings.register_profile(
    "random", deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("same", settings.get_profile("random"), derandomize=True, max_examples=40)
settings.load_profile("same")
