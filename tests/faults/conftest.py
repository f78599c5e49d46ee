"""What all fault tests share: a private temporary directory, the seed, the Hypothesis profiles.

FAULT_SEED=7 make faults                              repeat the random choices of a run
HYPOTHESIS_PROFILE=nightly make faults ARGS=-kmachine the long state machine
"""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# in the environment, so that the workers of a parallel run share it
SEED = int(os.environ.get("FAULT_SEED") or random.randrange(1 << 16))
os.environ["FAULT_SEED"] = str(SEED)

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "faults",
    settings.get_profile("random"),
    suppress_health_check=slow,
    print_blob=True,
    max_examples=20,
)
settings.register_profile("nightly", settings.get_profile("faults"), max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "faults"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"seed of the random choices: FAULT_SEED={SEED} repeats them")


@pytest.fixture(scope="session", autouse=True)
def private_directory() -> Iterator[str]:
    """Sockets and weights of all runs are in here, so that what is left of them is seen."""
    before = os.environ.get("TMPDIR")
    directory = tempfile.mkdtemp(prefix="faults-", dir="/tmp")  # short, for the socket's address
    os.environ["TMPDIR"] = tempfile.tempdir = directory
    yield directory
    tempfile.tempdir = before
    os.environ.pop("TMPDIR")
    shutil.rmtree(directory)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """The random choices of one test."""
    return random.Random(f"{SEED}/{request.node.name}")
