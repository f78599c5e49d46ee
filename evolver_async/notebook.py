"""Import paths of functions that live in a script or a notebook, for the processes of a run.

Those processes import a user's function by `module:name`. A function of an importable module has
such a name. One that was written in a notebook has none: its source is written to a file, with the
imports, functions and plain values that it refers to.
"""

import builtins
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evolver_async.config import ConfigError
from evolver_async.files import write_whole

PLAIN = (str, bytes, int, float, bool, type(None))


def import_path(function: Callable[..., Any], directory: Path) -> tuple[str, Path]:
    """Return `module:name` of a function, and the directory from which the module is imported.

    What a notebook defines is written to `rewards_<hash>.py` in `directory`. ConfigError for a
    function that no other process can import: a lambda, a closure, a method, or one that uses a
    value without a plain form.
    """
    name = getattr(function, "__qualname__", "")
    if not name.isidentifier():
        raise ConfigError(f"reward: {function!r} must be a function with a name at module level")
    main = sys.modules["__main__"]
    if function.__module__ != "__main__":
        module = sys.modules[function.__module__]
        return f"{function.__module__}:{name}", _root(module)
    script = getattr(main, "__file__", None)
    if script is not None and not hasattr(main, "get_ipython"):  # IPython has a __file__ at times
        path = Path(script).resolve()
        if not path.stem.isidentifier():
            raise ConfigError(
                f"reward: {path.name} cannot be imported: rename it, as in train_it.py"
            )
        return f"{path.stem}:{name}", path.parent
    source = _Source()
    source.add(name, function)
    text = source.text()
    stem = f"rewards_{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
    write_whole(directory / f"{stem}.py", text)
    return f"{stem}:{name}", directory


def _root(module: types.ModuleType) -> Path:
    """Return the directory from which the package of a module is imported."""
    file = getattr(module, "__file__", None)
    if file is None:
        raise ConfigError(f"reward: the module {module.__name__} has no file to import it from")
    path = Path(file).resolve()
    levels = module.__name__.count(".") + (path.name == "__init__.py")
    return path.parents[levels]


class _Source:
    """Source of a function and of everything that it refers to, in order of need."""

    def __init__(self) -> None:
        self._parts: dict[str, str] = {}

    def text(self) -> str:
        head = '"""Written by `evolver_async.train` for the processes of a run and its resumes."""'
        return "\n\n".join([head, *self._parts.values()]) + "\n"

    def add(self, name: str, value: Any) -> None:
        """Add what the global `name` stands for. ConfigError if it has no plain form."""
        if name in self._parts:
            return
        self._parts[name] = ""  # a function may refer to itself
        text = self._defined(name, value)
        del self._parts[name]  # what it needs comes before it
        self._parts[name] = text

    def _defined(self, name: str, value: Any) -> str:
        if isinstance(value, types.ModuleType):
            return f"import {value.__name__} as {name}"
        home = getattr(value, "__module__", None)
        if isinstance(value, types.FunctionType | type) and home != "__main__":
            return f"from {home} import {value.__qualname__} as {name}"
        if isinstance(value, types.FunctionType):
            if value.__closure__ or value.__name__ == "<lambda>":
                raise ConfigError(
                    f"reward: {name} is a closure or a lambda: write it as a function"
                )
            self._add_globals(value.__code__, value.__globals__)
            return inspect.cleandoc("\n" + inspect.getsource(value))
        if isinstance(value, re.Pattern):
            self.add("re", re)
            return f"{name} = re.compile({value.pattern!r}, {value.flags})"
        if _is_plain(value):
            return f"{name} = {value!r}"
        raise ConfigError(
            f"reward: it uses {name}, a {type(value).__name__} of the notebook, which other"
            " processes do not have: write the reward function in a module of its own"
        )

    def _add_globals(self, code: types.CodeType, known: dict[str, Any]) -> None:
        for name in code.co_names:
            if name in known and not hasattr(builtins, name):
                self.add(name, known[name])
        for constant in code.co_consts:  # comprehensions and functions inside it
            if isinstance(constant, types.CodeType):
                self._add_globals(constant, known)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)
