"""Process that calls functions of reward terms, one at a time: what `workers.py` starts.

    request    {"path": "module:function", "arguments": {…} or None, "made": {name: step}}
    reply      {"value": …, "metrics": {…}} or {"error": text}

Without arguments the function is imported alone.
"""

import importlib
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from actors.child_main import serve


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    metrics: dict[str, float] = {}
    try:
        function, arguments = _found(request["path"]), request["arguments"]
        if arguments is None:
            return {"value": None, "metrics": metrics}
        value = function(**arguments, **made(request["made"], metrics))
        return {"value": plain(value), "metrics": metrics}
    except BaseException as error:  # a user's code, which can raise anything, SystemExit too
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}


@cache
def _found(path: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def made(steps: dict[str, int], metrics: dict[str, float]) -> dict[str, Any]:
    """Make the arguments that cannot travel: those of TRL's that are objects.

    `steps`: by name the step at which the policy is; what is logged goes to `metrics`.
    """
    found: dict[str, Any] = {}
    if "trainer_state" in steps:
        found["trainer_state"] = SimpleNamespace(global_step=steps["trainer_state"])
    if "log_metric" in steps:

        def log_metric(name: str, value: float) -> None:
            metrics[str(name)] = float(value)

        found["log_metric"] = log_metric
    return found


def plain(value: Any) -> Any:
    """Return a function's result with floats for its numbers, those of numpy and torch included."""
    if value is None or isinstance(value, str):
        return value
    if hasattr(value, "tolist"):  # an array, a tensor, or one of their numbers
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return float(value)


if __name__ == "__main__":
    serve(_answer)
