"""How Hypothesis draws: the same examples every time, however slow the machine, so that a red run
speaks of the change it ran on. The time limit of every test is in `time_limit.py`,
the mark of tests that start processes in `process_mark.py`.

make test ARGS=--hypothesis-profile=random    draws anew, and two and a half times as often
"""

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import certifi
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


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    """Take back what a test or a command that it ran made of the root logger.

    A handler that is left writes to the stderr of its own test, which is closed: the next record of
    any test in the same process then prints "Logging error" into that test's output.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for left in set(root.handlers) - set(handlers):
        left.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def few_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let clients of HTTP know one authority: they read all 140 of them, 50 ms for each client."""
    text, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    path = tmp_path_factory.mktemp("authorities") / "one.pem"
    path.write_text(text + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


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
