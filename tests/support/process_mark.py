"""Mark `process`: tests that start a Python process. A test that starts one without it fails.

make test ARGS="-m 'not process'"    everything else, for every edit
"""

import sys
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

STARTS = frozenset(("subprocess.Popen", "os.posix_spawn"))  # others ask the system, as uname does
WHOLE_RUNS = {"faults", "gpu", "system", "vllm"}
started: list[str] = []


def note(event: str, arguments: tuple) -> None:
    """Note the programs that this process starts."""
    if event in STARTS and Path(str(arguments[0])).name.startswith("python"):
        started.append(f"{event} {arguments[:1]}")


def spawn(path: Any, arguments: Any, descriptors: Any) -> int:
    """Start a process of multiprocessing, which no audit event reports."""
    if not any("resource_tracker" in str(argument) for argument in arguments):
        started.append(f"multiprocessing {arguments}")
    return _spawn(path, arguments, descriptors)


sys.addaudithook(note)
_spawn, util.spawnv_passfds = util.spawnv_passfds, spawn


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the suites of whole runs."""
    for item in items:
        if WHOLE_RUNS & set(item.path.parts):
            item.add_marker("process")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail an unmarked test if it, or a fixture that it was the first to need, started one."""
    result = yield
    mine, started[:] = list(started), []
    if mine and item.get_closest_marker("process") is None:
        pytest.fail(f"mark it `process`, since it started {mine[0]}")
    return result
