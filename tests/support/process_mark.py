"""Mark `process`: tests that start a Python process, or run the whole system in this one.

make test ARGS="-m 'not process'"    everything else, for every edit

There a test that starts one fails. Elsewhere it is only warned of: which test is the first to need
what many share, and starts it, depends on the order.
"""

import sys
import warnings
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

STARTS = frozenset(("subprocess.Popen", "os.posix_spawn"))  # others ask the system, as uname does
TESTS = Path(__file__).parents[1]
WHOLE_RUNS = {"faults", "gpu", "model", "ray", "system", "vllm"}  # folders of TESTS
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
    """Mark the suites of whole runs; let files with such tests begin, so that none is left last.

    Before them come files with a test that has a time limit of its own, as it takes very long.
    """
    longest_s: dict[Path, float] = {}  # of the tests in a file that are not done in a moment
    for item in items:
        if item.path.is_relative_to(TESTS) and item.path.relative_to(TESTS).parts[0] in WHOLE_RUNS:
            item.add_marker("process")
        if limit := item.get_closest_marker("time_limit"):
            longest_s[item.path] = max(float(limit.args[0]), longest_s.get(item.path, 0.0))
        elif item.get_closest_marker("process"):
            longest_s.setdefault(item.path, 0.0)
    items.sort(key=lambda item: -longest_s.get(item.path, -1.0))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Forget what ended tests started, as they were taken down."""
    started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail or warn of an unmarked test if it, or a fixture that it needs, started one."""
    result = yield
    if started and item.get_closest_marker("process") is None:
        finding = f"mark {item.nodeid} `process`, since it started {started[0]}"
        if "not process" in item.config.option.markexpr:
            pytest.fail(finding)
        warnings.warn(finding, stacklevel=1)
    return result
