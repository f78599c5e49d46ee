"""Checks of what an environment returns, so that a wrong type is its failure and names it.

Numbers and truth values of numpy become Python's own: the wire takes no others.
"""

import math
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from evolver_async.config.values.rules import check_plain
from evolver_async.env import Exact, Info, Step

METRIC_NAME = re.compile(r"[\w.@-]{1,64}")


class Opening(NamedTuple):
    """First messages of an episode: the last one from the user, roles and texts of those `before`
    it, and the text of a system message."""

    user: str
    before: tuple[tuple[str, str], ...] = ()
    system: str = ""

    @property
    def text(self) -> str:
        """The user's messages in it, one below the other."""
        said = [text for role, text in self.before if role == "user"]
        return "\n".join([*said, self.user])

    def asked(self, query: str) -> "Opening":
        """Return it with a task's query in front of the last message; without one as it is."""
        return self._replace(user=f"{query}\n{self.user}") if query else self

    def under(self, system: str) -> str:
        """Return the system message, the given text in front of its own."""
        return "\n\n".join(part for part in (system, self.system) if part)


def checked_opening(value: object) -> Opening:
    """Return the first messages, from a text or from chat messages; TypeError or ValueError for
    others."""
    if not isinstance(value, list):
        if isinstance(value, str):
            return Opening(value)
        raise TypeError(f"an observation must be a text or chat messages, is {_described(value)}")
    said = list[tuple[str, str]]()
    for number, one in enumerate(value):
        if not isinstance(one, dict) or not {"role", "content"} <= one.keys():
            raise TypeError(f"message {number} must be a dict with role and content, is {one!r}")
        role = text(f"role of message {number}", one["role"])
        if role not in (("system", "user", "assistant") if number == 0 else ("user", "assistant")):
            first = "" if number == 0 else ", a system message the first one"
            raise ValueError(f"message {number} must be from user or assistant{first}, is {role!r}")
        said.append((role, text(f"content of message {number}", one["content"])))
    if not said or said[-1][0] != "user":
        raise ValueError("chat messages must end with one from the user")
    system = said.pop(0)[1] if said[0][0] == "system" else ""
    return Opening(said[-1][1], tuple(said[:-1]), system)


def checked_observation(value: object) -> str:
    """Return `value`; TypeError if it is no text."""
    return text("an observation", value)


def checked_step(value: object) -> Step:
    """Return `value`; TypeError, which names the field, if it is not a Step of the right types."""
    if not isinstance(value, Step):
        raise TypeError(f"step must return a Step, returned {_described(value)}")
    checked_observation(value.observation)
    reward = number("reward of the Step", value.reward)
    terminated = truth("terminated of the Step", value.terminated)
    truncated = truth("truncated of the Step", value.truncated)
    if not isinstance(value.info, Info):
        raise TypeError(f"info of the Step must be an Info, is {_described(value.info)}")
    names = "valid", "success", "tool_error"
    facts = (truth(f"{name} of the Info", getattr(value.info, name)) for name in names)
    metrics = checked_metrics("metrics of the Info", value.info.metrics)
    info = Info(**dict(zip(names, facts, strict=True)), metrics=metrics)
    return Step(value.observation, reward, terminated, truncated, info)


def checked_metrics(what: str, value: object) -> dict[str, float]:
    """Return finite numbers by name; TypeError or ValueError, which names the wrong one."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a mapping, is {_described(value)}")
    for name in value:
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            raise ValueError(f"{what}: the name {name!r} is not of letters, digits and _ . @ -")
    return {name: finite(f"{name} in the {what}", found) for name, found in value.items()}


def checked_verdict(value: object) -> tuple[float, bool]:
    """Return reward and success; TypeError, which names the wrong one."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"verdict must return (reward, success), returned {_described(value)}")
    return number("reward of the verdict", value[0]), truth("success of the verdict", value[1])


def checked_tools(value: object) -> list[dict[str, Any]]:
    """Return the specs of tools; TypeError or ValueError, which names the wrong one."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"tools must return a list of specs, returned {_described(value)}")
    for number, spec in enumerate(value):
        if not isinstance(spec, dict):
            raise TypeError(f"tool {number} must be a dict, is {_described(spec)}")
        if not isinstance(spec.get("name"), str) or not spec["name"]:
            raise ValueError(f"tool {number} has no name")
    names = [spec["name"] for spec in value]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"tools has {', '.join(double)} more than once")
    return [*value]


def checked_exact(value: object) -> Exact:
    """Return `value`; TypeError or ValueError, which names the field, if it is not an Exact of
    finite numbers."""
    if not isinstance(value, Exact):
        raise TypeError(f"exact must return an Exact, returned {_described(value)}")
    fields = dict(zip((f"{name} of the Exact" for name in Exact._fields), value, strict=True))
    random, optimal, *returns = fields.items()
    known = (None if one is None else finite(name, one) for name, one in returns)
    return Exact(finite(*random), finite(*optimal), *known)


def checked_score(value: object) -> float:
    """Return the score; TypeError if it is no number."""
    return number("a score", value)


def checked_goal(value: object) -> dict[str, Any] | None:
    """Return the parameters of a task; TypeError or ValueError, which names the wrong one."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise TypeError(f"goal must return a dict or None, returned {_described(value)}")
    params = _plain(value)
    check_plain("goal", params)
    return params


def _plain(value: Any) -> Any:
    """Replace numpy's numbers by Python's and tuples by lists."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    return value.item() if isinstance(value, np.generic) else value


def text(name: str, value: object) -> str:
    """Return `value`; TypeError, which names it, if it is no text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, is {_described(value)}")
    return value


def number(name: str, value: object) -> float:
    """Return a number as a float; TypeError, which names it, for anything else."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, is {_described(value)}")
    return float(value)


def finite(name: str, value: object) -> float:
    """Return a finite number as a float; TypeError or ValueError, which names it, for others."""
    found = number(name, value)
    if not math.isfinite(found):
        raise ValueError(f"{name} must be finite, is {found}")
    return found


def truth(name: str, value: object) -> bool:
    """Return a truth value as a bool; TypeError, which names it, for anything else."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, is {_described(value)}")
    return bool(value)


def _described(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
