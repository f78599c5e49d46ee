"""Protocol of environments, their lookup by name or import path, and their failures.

An environment is a small synchronous object that plays one episode after `reset`. Its constructor
takes its parameters as typed keyword arguments and does no work. `reset`, `step`, `close` and
`tools` may be async. Where its calls are made is its class's `isolation`, or what the configuration
says (see `isolation_of`).
"""

import contextlib
import importlib
import inspect
import typing
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import msgspec

from actors.envs.return_checks import Opening, checked_opening
from evolver_async.config.secrets import mask, reveal
from evolver_async.env import Exact, Step
from evolver_async.extension import RAISED
from evolver_async.schema import Task
from evolver_async.wire.failure_totals import FailureKind

REGISTRY = {
    "agentevolver": "actors.adapters.agentevolver_service:AgentEvolver",
    "agentevolver_code": "actors.adapters.agentevolver_service:AgentEvolverCode",
    "bandit": "actors.envs.bandit:Bandit",
    "bookings": "actors.envs.bookings.bookings_env:Bookings",
    "cliff_walking": "actors.envs.grid.cliff_walking:CliffWalking",
    "code": "actors.envs.code.code_env:Code",
    "frozen_lake": "actors.envs.grid.frozen_lake:FrozenLake",
    "gymnasium": "actors.adapters.gymnasium_env:Gymnasium",
    "gymnasium_table": "actors.adapters.gymnasium_env:GymnasiumTable",
    "openenv": "actors.adapters.openenv_env:OpenEnv",
    "prompts": "actors.envs.row_prompts:Prompts",
    "reasoning_gym": "actors.adapters.reasoning_gym_env:ReasoningGym",
    "scienceworld": "actors.adapters.scienceworld_env:ScienceWorld",
    "sokoban": "actors.envs.grid.sokoban:Sokoban",
    "textarena": "actors.adapters.textarena_env:TextArena",
    "textworld": "actors.adapters.textworld_env:TextWorld",
    "verifiers": "actors.adapters.verifiers_env:Verifiers",
    "webshop": "actors.envs.webshop.webshop_env:WebShop",
    "webshop_tools": "actors.envs.webshop.webshop_env:ToolShop",
    "workshop": "actors.envs.workshop.workshop_env:Workshop",
    "workshop_tools": "actors.envs.workshop.workshop_env:ToolWorkshop",
}

FOREIGN = ("gymnasium", "textarena")  # these play what others have written

REQUIRED = ("reset", "step", "close")  # methods of every environment
AWAITED = (*REQUIRED, "tools")  # those that may be async


class EnvError(ValueError):
    """The configuration asks for an impossible environment; the message names the key."""


class EnvironmentFailure(Exception):
    """An environment raised an exception or missed a deadline.

    `name`: which one; `where`: in which task and for how long; `error`: what it was `doing`, and
    why it failed.
    """

    kind: FailureKind = "environment"

    def __init__(self, name: str, where: str, doing: str, cause: BaseException) -> None:
        reason = f"{type(cause).__name__}: {cause}"
        super().__init__(mask(f"{self.kind} {name}, {where}: {reason}"))
        self.name = name
        self.error = f"{doing}: {reason}" if doing else reason
        self.cause = cause


class Env(Protocol):
    """Environment of one episode at a time: `reset`, then `step` until `terminated` or
    `truncated`. A class that derives from it has a `close` that does nothing. One with `reusable =
    True` can be `reset` again, instead of being closed and made anew for the next episode."""

    instructions: str  # for the system message: what the task is and which actions exist

    def reset(self, task: Task, dynamics_seed: int) -> str | list[dict[str, Any]]:
        """Begin `task`, all chance keyed by `dynamics_seed`; returns the first observation, a text
        or chat messages ({"role", "content"}, one of the system first or none, the last one from
        the user)."""
        ...

    def step(self, action: str) -> Step:
        """Carry out an action. An unknown action changes nothing and gives `info.valid` False."""
        ...

    def close(self) -> None:
        """Release what the episode holds."""


@runtime_checkable
class Described(Env, Protocol):
    """Environment with two wordings of its instructions: `instructions` in the words of the tiny
    tokenizer, `plain_instructions` in plain English for models of normal size (`env.prompt`)."""

    plain_instructions: str


@runtime_checkable
class Formatted(Env, Protocol):
    """Environment made for one turn format: the one that `rollout.format: auto` means for it."""

    turn_format: str


@runtime_checkable
class Bounded(Env, Protocol):
    """Environment whose episodes end after so many turns, readable or not."""

    max_turns: int


@runtime_checkable
class Solvable(Env, Protocol):
    """Environment that can demonstrate: it knows its actions and the way to success."""

    def actions(self) -> list[str]:
        """Return all actions that exist in the current state."""
        ...

    def solve(self) -> list[str]:
        """Return the best actions from the current state on, as many as are certain to stay the
        best."""
        ...


@runtime_checkable
class Tooled(Env, Protocol):
    """Environment whose actions are tool calls as text (`actors/formats/tool_calls.py`)."""

    def tools(self) -> list[dict[str, Any]]:
        """Return the tools of the task begun by `reset`, as JSON-schema function specs: `{"name",
        "description", "parameters"}`. Asked once an episode; may be async."""
        ...


@runtime_checkable
class Delegated(Env, Protocol):
    """Environment whose tasks only an agent can play."""

    agent: str  # its import path, for `rollout.agent`; "": these parameters need none
    players: tuple[str, ...]  # that it names, for `rollout.players`


@runtime_checkable
class Probed(Env, Protocol):
    """Environment with requirements that not every machine meets."""

    def probe(self) -> None:
        """Raise ValueError for a missing requirement."""


@runtime_checkable
class Limited(Env, Protocol):
    """Environment whose parameters limit each of its own calls in time."""

    longest_call_s: float  # of one `reset`, `step` or `verdict` in seconds


@runtime_checkable
class Located(Env, Protocol):
    """Environment whose states have names."""

    def state(self) -> str:
        """Return a short key of the current state; the same text for the same state of a task."""
        ...


@runtime_checkable
class Identified(Env, Protocol):
    """Environment whose first observation does not tell its tasks apart."""

    def content(self) -> str:
        """Return the task begun by `reset` as text, without chance: the same text for the same
        task, whatever its number."""
        ...


@runtime_checkable
class Rewindable(Solvable, Located, Protocol):
    """Environment that can be restored from snapshots."""

    def snapshot(self) -> Any:
        """Return all that `step` changes."""
        ...

    def restore(self, snapshot: Any) -> None: ...


@runtime_checkable
class Scored(Env, Protocol):
    """Environment that measures progress."""

    def score(self) -> float:
        """Return the closeness of the current state to the solution; more is better."""
        ...


@runtime_checkable
class Concluding(Env, Protocol):
    """Environment that gives its reward at the end, also at an end set by the rollout."""

    def verdict(self) -> tuple[float, bool]:
        """Return reward and success if the rollout ends the episode: at its limit of turns, of
        tokens or of unreadable turns. Called at most once."""
        ...


@runtime_checkable
class Goals(Env, Protocol):
    """Environment that can be explored and whose states can be made goals.

    Its constructor takes `free`: an episode without any goal.
    """

    def goal(self) -> dict[str, Any] | None:
        """Return the parameters that make the state reached the goal of the task begun by `reset`.

        They replace those of the same name. None for a state that cannot be one, also where the
        task would belong to another split.
        """
        ...


@runtime_checkable
class Measurable(Env, Protocol):
    """Environment whose random and optimal policies can be computed."""

    def exact(self, max_turns: int) -> Exact:
        """Return the values of the task begun by `reset`, within `max_turns` actions."""
        ...


def asynchronous(env: Env | type[Env]) -> bool:
    """Return True if a call of the environment has to be awaited."""
    return any(inspect.iscoroutinefunction(getattr(env, part, None)) for part in AWAITED)


def isolation_of(name: str, found: type[Env], chosen: str = "auto") -> str:
    """Return where calls of the environment of this name are made.

    `loop`: on the actor's event loop, where a call that does not return stops the actor; `thread`:
    each in one of its own; `process`: in other processes. `chosen` is `env.isolation`; its `auto`
    is what the class says, else `loop` for our own and for async ones and `thread` for others.
    """
    if chosen == "auto":
        chosen = getattr(found, "isolation", "auto")
    if chosen != "auto":
        return chosen
    return "loop" if name in REGISTRY or asynchronous(found) else "thread"


def undeclared(name: str, found: type[Env]) -> bool:
    """Return True for a class of others that does not say whether threads can share it."""
    return getattr(found, "isolation", "auto") == "auto" or name in FOREIGN


@contextlib.asynccontextmanager
async def begun(task: Task) -> AsyncIterator[tuple[Env, Opening]]:
    """Make the environment of a task and begin it; yield it with its first messages, the task's
    query in them if it has one."""
    env = make_env(task.env, task.params)
    try:
        opening = checked_opening(await settled(env.reset(task, 0)))
        yield env, opening.asked(task.query)
    finally:
        await settled(env.close())


async def settled(value: Any) -> Any:
    """Return the value, awaited if necessary."""
    return await value if inspect.isawaitable(value) else value


def env_class(name: str) -> type[Env]:
    """Return the class of a registered name or of an import path; EnvError names `env.name`."""
    path = REGISTRY.get(name, name)
    module, separator, attribute = path.partition(":")
    if not separator:
        known = ", ".join(sorted(REGISTRY))
        hint = f"(known: {known}; or package.module:Class)"
        raise EnvError(f"env.name: no environment {name!r} {hint}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except RAISED as error:  # importing runs whatever the module does
        raise EnvError(f"env.name: cannot import {name!r}: {one_line(error)}") from error
    missing = [part for part in REQUIRED if not hasattr(found, part)]
    if missing:
        raise EnvError(f"env.name: {name!r} has no {', '.join(missing)}")
    return found


def make_env(name: str, params: dict[str, Any]) -> Env:
    """Make an environment; EnvError names `env.name` or `env.params.<key>`."""
    found = env_class(name)
    try:
        known, hints = _parameters(found)
    except RAISED as error:  # resolving annotations evaluates them
        problem = f"the parameters of {name!r} cannot be read: {one_line(error)}"
        raise EnvError(f"env.name: {problem}") from error
    arguments = {}
    for param, value in reveal(params).items():
        if param not in known:
            listing = ", ".join(known) or "none"
            raise EnvError(f"env.params.{param}: {name} has no such parameter (known: {listing})")
        try:
            arguments[param] = msgspec.convert(value, hints.get(param, Any))
        except msgspec.ValidationError as error:
            raise EnvError(f"env.params.{param}: {mask(str(error))}") from error
    try:
        return found(**arguments)
    except (TypeError, ValueError) as error:
        raise EnvError(f"env.params.{mask(str(error))}") from error
    except RAISED as error:  # a constructor of one's own, which can raise anything
        raise EnvError(f"env.name: {name!r} cannot be made: {one_line(error)}") from error


def makes_goals(found: type[Env]) -> bool:
    """Return True if environments of this class can be explored, and their states made goals."""
    return hasattr(found, "goal") and "free" in _parameters(found)[0]


@lru_cache
def _parameters(found: type[Env]) -> tuple[Mapping[str, inspect.Parameter], dict[str, Any]]:
    """Return the parameters of a class's constructor, and their types."""
    return inspect.signature(found).parameters, typing.get_type_hints(found.__init__)


def one_line(error: BaseException) -> str:
    """Render an error's type and text on one line, without secrets."""
    return mask(" ".join(f"{type(error).__name__}: {error}".split()))
