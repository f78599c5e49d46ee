"""A function of a script, a module or a notebook gets an import path that another process finds."""

import importlib.util
import linecache
import sys
import types
from pathlib import Path

import own_functions
import pytest

from evolver_async.config import ConfigError
from evolver_async.notebook import import_path

CELL = '''
import math
import re
from statistics import fmean as mean

LIMIT = {"most": [1, 2.5, None]}
NUMBER = re.compile(r"\\d+", re.IGNORECASE)

def last(text):
    found = NUMBER.findall(text)
    return float(found[-1]) if found else math.nan

def correct(completions, answer, **_):
    """One number a reply."""
    return [mean([float(last(one) == float(right)) for _ in LIMIT["most"]])
            for one, right in zip(completions, answer)]

opened = open(__cell__)

def holds_a_file(completions, **_):
    return [len(opened.name) for _ in completions]

def outer():
    def inner(completions, **_):
        return [LIMIT for _ in completions]
    return inner

made = outer()
short = lambda completions, **_: [1.0]
'''


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A notebook's `__main__`, in which one cell has run."""
    path = tmp_path / "cell"
    path.write_text(CELL)
    monkeypatch.setitem(
        linecache.cache, "<cell>", (len(CELL), None, CELL.splitlines(True), "<cell>")
    )
    main = types.ModuleType("__main__")
    vars(main)["__cell__"] = str(path)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(CELL, "<cell>", "exec"), vars(main))
    return main


def test_a_notebooks_function_is_written_with_what_it_needs(
    cell: types.ModuleType, tmp_path: Path
) -> None:
    name, root = import_path(cell.correct, tmp_path)
    assert root == tmp_path
    stem, _, attribute = name.partition(":")
    spec = importlib.util.spec_from_file_location(stem, tmp_path / f"{stem}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert getattr(module, attribute)(["I say 12", "no"], answer=["12", "3"]) == [1.0, 0.0]
    assert import_path(cell.correct, tmp_path)[0] == name, "the same source has the same name"


@pytest.mark.parametrize("name", ["holds_a_file", "made", "short"])
def test_what_other_processes_cannot_have_is_refused_by_name(
    cell: types.ModuleType, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match=r"^reward: "):
        import_path(getattr(cell, name), tmp_path)
    assert not list(tmp_path.glob("*.py"))


def test_a_function_of_a_module_has_its_own_path(tmp_path: Path) -> None:
    function = next(
        one
        for one in vars(own_functions).values()
        if isinstance(one, types.FunctionType) and one.__module__ == "own_functions"
    )
    name, root = import_path(function, tmp_path)
    assert name == f"own_functions:{function.__name__}"
    assert (root / "own_functions.py").is_file()


def test_a_function_of_a_script_is_imported_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "train_sums.py")
    exec("def correct(completions, **_): return [1.0]", vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert import_path(main.correct, tmp_path) == ("train_sums:correct", tmp_path)
    main.__file__ = str(tmp_path / "train-sums.py")
    with pytest.raises(ConfigError, match=r"train-sums\.py"):
        import_path(main.correct, tmp_path)
