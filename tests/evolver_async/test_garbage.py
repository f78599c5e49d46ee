"""Garbage collection of a process: see `evolver_async/process/garbage.py`."""

import gc
import subprocess
import sys

import pytest

from evolver_async.process.garbage import permanent_imports


@pytest.fixture(autouse=True)
def _collecting() -> None:
    assert gc.isenabled()


def test_what_is_imported_is_never_traversed_again() -> None:
    before = gc.get_freeze_count()
    with permanent_imports():
        assert not gc.isenabled()
        made: list[object] = []
        made.append(made)
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert not any(one is made for one in gc.get_objects())


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), permanent_imports():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with permanent_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.process
def test_a_role_is_imported_without_collections() -> None:
    """The role of a process: none of its modules is traversed while they are imported."""
    counted = (
        "import gc\n"
        "from evolver_async.launch.registry import resolve\n"
        "before = [one['collections'] for one in gc.get_stats()]\n"
        "resolve('buffer')\n"
        "print([one['collections'] for one in gc.get_stats()] == before, gc.isenabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", counted], capture_output=True, text=True)
    assert done.stdout == "True True\n", done.stderr
