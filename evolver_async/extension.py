"""Implementations by name: the built-in ones of a registry, or a user's own by import path.

A registry maps the names that a configuration key allows to functions of one signature. A value
`package.module:function` names a function of the user's with the same signature, and everything
that works for the built-in ones works for it.
"""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., object])
RAISED = Exception, SystemExit  # by a user's code, whose exit must not end the process


class Builtins(dict[str, F]):
    """Registry of the functions of the built-in kinds of `key`, entered by `@builtins(name)`."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def __call__(self, name: str, **attributes: object) -> Callable[[F], F]:
        """Enter a function, which gets these attributes. ValueError if the kind has one."""

        def enter(function: F) -> F:
            if name in self:
                raise ValueError(f"{self.key}={name}: two functions")
            vars(function).update(attributes)
            self[name] = function
            return function

        return enter

    def of(self, name: str) -> F:
        """Return the function that the key names, as `implementation` does."""
        return implementation(self.key, name, self)


def is_own(name: str) -> bool:
    """Return True if `name` is the import path of a user's function."""
    return ":" in name


def implementation(key: str, name: str, registry: Mapping[str, F]) -> F:
    """Return the function that the configuration's `key` names.

    Raises ValueError, which names the key, if a user's function cannot be imported or does not
    take as many arguments as the built-in ones, and those by keyword that have no default there. An
    exception in it gets a note with the key, and a call of `sys.exit` in it is one.
    """
    if not is_own(name):
        return registry[name]
    pattern = inspect.signature(next(iter(registry.values()))).parameters.values()
    keys = [one for one in pattern if one.kind == inspect.Parameter.KEYWORD_ONLY]
    named = [one.name for one in keys if one.default is inspect.Parameter.empty]
    placed = [one.name for one in pattern if one not in keys]
    return own_function(key, name, placed, named)  # pyright: ignore[reportReturnType]


def own_function(
    key: str, name: str, placed: Sequence[str], named: Sequence[str] = ()
) -> Callable[..., Any]:
    """Return a user's function that takes these arguments, as `implementation` does."""
    found = imported(key, name)
    try:
        inspect.signature(found).bind(*placed, **dict.fromkeys(named))
    except (TypeError, ValueError) as error:  # the latter: it does not tell its parameters
        wanted = ", ".join([*placed, *(f"{name}=" for name in named)])
        raise ValueError(f"{key}: {name!r} does not take ({wanted}): {error}") from None
    return noted(key, name, found) if inspect.isfunction(found) else found


def imported(key: str, name: str) -> Callable[..., object]:
    """Import what `module:function` names. Raises ValueError, naming the key, if it cannot be."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except RAISED as error:  # the module's own code runs, which can raise anything
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{key}: cannot import {name!r}: {problem}") from error
    if not callable(found):
        raise ValueError(f"{key}: {name!r} is not a function")
    return found


def noted(key: str, name: str, function: F) -> F:
    """Return the function with a note in its exceptions, the last line of their tracebacks.

    Its `sys.exit` is a RuntimeError: code 0 would look as if the process had finished its work.
    """

    @functools.wraps(function)
    def called(*placed: object, **named: object) -> object:
        try:
            return function(*placed, **named)
        except SystemExit as stop:
            raise RuntimeError(f"{key}: {name} called sys.exit({stop.code!r})") from stop
        except Exception as error:  # a user's code, which can raise anything
            error.add_note(f"{key}: {name} raised {type(error).__name__}: {error}")
            raise

    return called  # pyright: ignore[reportReturnType]


def find_modules(*, own: bool) -> None:
    """Let the wings be imported and, if `own`, modules of the working directory behind all others.

    A user's environments and agents are found there. A file there hides no module that exists.
    """
    sys.path.insert(0, str(Path(__file__).parents[1]))
    for wing in ("actors", "learner"):
        importlib.import_module(wing)
    del sys.path[0]
    if own and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
