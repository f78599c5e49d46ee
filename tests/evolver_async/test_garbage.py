"""Garbage collection of a process: see `evolver_async/process/garbage.py`."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from evolver_async.launch.registry import resolve
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


def test_what_is_garbage_before_an_import_is_freed() -> None:
    class Node:
        """A reference cycle, as layers that are recomputed are."""

    node = Node()
    node.__dict__["itself"] = node
    gone = weakref.ref(node)
    del node
    with permanent_imports():
        assert gone() is None


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
        "young = lambda: [one['collections'] for one in gc.get_stats()[:2]]\n"
        "before = young()\n"
        "resolve('buffer')\n"
        "print(young() == before, gc.isenabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", counted], capture_output=True, text=True)
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "ValueError"])
def test_ctrl_c_during_an_import_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str
) -> None:
    """Python 3.11 makes a RuntimeError of what a class body raises, and a library another of it."""
    name = f"made_to_raise_{raised.lower()}"
    (tmp_path / f"{name}.py").write_text(
        "class Part:\n"
        "    def __set_name__(self, owner, name):\n"
        f"        raise {raised}\n"
        "try:\n"
        "    class Whole:\n"
        "        part = Part()\n"
        "except Exception as error:\n"
        "    raise ImportError('of a library') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    expected = KeyboardInterrupt if raised == "KeyboardInterrupt" else ImportError
    with pytest.raises(expected):
        resolve(f"{name}:Whole")
