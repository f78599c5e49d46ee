"""What an environment is, how one is found by name or import path, and how its failures look.

An environment is a small synchronous object that plays one episode after `reset`. Its constructor
takes its parameters as typed keyword arguments and does no work. `reset`, `step` and `close` may be
async. An environment of one's own is called in a thread of its own, unless it is async or its class
says `blocking = False`: then a call that does not return stops its actor (see
`actors/rollout/environment.py`).
"""

import asyncio
import hashlib
import importlib
import inspect
import statistics
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from evolver_async.config.secrets import mask, reveal
from evolver_async.schema import FailureKind, Task

REGISTRY = {
    "agentevolver": "actors.envs.adapters.agentevolver_service:AgentEvolver",
    "agentevolver_code": "actors.envs.adapters.agentevolver_service:AgentEvolverCode",
    "bandit": "actors.envs.bandit:Bandit",
    "cliff_walking": "actors.envs.grid.cliff_walking:CliffWalking",
    "code": "actors.envs.code.env:Code",
    "frozen_lake": "actors.envs.grid.frozen_lake:FrozenLake",
    "gymnasium": "actors.envs.adapters.gymnasium_env:Gymnasium",
    "gymnasium_table": "actors.envs.adapters.gymnasium_env:GymnasiumTable",
    "openenv": "actors.envs.adapters.openenv_env:OpenEnv",
    "reasoning_gym": "actors.envs.adapters.reasoning_gym_env:ReasoningGym",
    "sokoban": "actors.envs.grid.sokoban:Sokoban",
    "textarena": "actors.envs.adapters.textarena_env:TextArena",
    "verifiers": "actors.envs.adapters.verifiers_env:Verifiers",
    "webshop": "actors.envs.webshop.env:WebShop",
    "webshop_tools": "actors.envs.webshop.env:ToolShop",
}


AWAITED = ("reset", "step", "close")  # of an environment's methods those that may be async


class EnvError(ValueError):
    """The configuration asks for an environment that cannot be; the message names the key."""


class EnvironmentFailure(Exception):
    """An environment raised an exception or missed a deadline.

    `name`: which one; `where`: in which task and for how long; `error`: what it was `doing`, and
    why it failed.
    """

    kind: FailureKind = "environment"

    def __init__(self, name: str, where: str, doing: str, cause: BaseException) -> None:
        said = f"{type(cause).__name__}: {cause}"
        super().__init__(mask(f"{self.kind} {name}, {where}: {said}"))
        self.name = name
        self.error = f"{doing}: {said}" if doing else said
        self.cause = cause


@dataclass(frozen=True)
class Info:
    """`valid`: the action existed; `success`: the task is solved; `tool_error`: a tool was called
    and failed."""

    valid: bool = True
    success: bool = False
    tool_error: bool = False


class Step(NamedTuple):
    """What one action led to. `observation` is the text of the next user message; the last one is
    no message any more, but what a world model learns and a grader reads."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Info


@dataclass(frozen=True)
class Exact:
    """Computed success probabilities of the uniform random and of the optimal policy, and where
    rewards tell more than success does their returns: the optimal policy may be another then."""

    random: float
    optimal: float
    random_return: float | None = None
    optimal_return: float | None = None


class Env(Protocol):
    """One episode at a time: `reset`, then `step` until `terminated` or `truncated`."""

    instructions: str  # for the system message: what the task is and which actions exist

    def reset(self, task: Task, dynamics_seed: int) -> str:
        """Begin `task`, all chance keyed by `dynamics_seed`; returns the first observation."""
        ...

    def step(self, action: str) -> Step:
        """Act. An action that does not exist changes nothing and gives `info.valid` False."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Described(Env, Protocol):
    """An environment with two wordings of its instructions: `instructions` in the words of the tiny
    tokenizer, `plain_instructions` in plain English for models of normal size (`env.prompt`)."""

    plain_instructions: str


@runtime_checkable
class Solvable(Env, Protocol):
    """An environment that can demonstrate: it knows its actions and how to reach success."""

    def actions(self) -> list[str]:
        """All actions that exist in the current state."""
        ...

    def solve(self) -> list[str]:
        """The best actions from the current state on: as many as are certain to stay the best."""
        ...


@runtime_checkable
class Tooled(Env, Protocol):
    """An environment whose actions are tool calls as text (`actors/formats/tool_calls.py`)."""

    def tools(self) -> list[dict[str, Any]]:
        """What can be called, as JSON-schema function specs: `{"name", "description",
        "parameters"}`; known before `reset`, and the same for every task."""
        ...


@runtime_checkable
class Probed(Env, Protocol):
    """An environment that needs something which not every machine has."""

    def probe(self) -> None:
        """ValueError says what is missing here."""
        ...


@runtime_checkable
class Located(Env, Protocol):
    """An environment whose states have names."""

    def state(self) -> str:
        """A short key of the state one is in; the same words for the same state of a task."""
        ...


@runtime_checkable
class Rewindable(Solvable, Located, Protocol):
    """An environment in which one can walk ahead and go back."""

    def snapshot(self) -> Any:
        """All that `step` changes."""
        ...

    def restore(self, snapshot: Any) -> None: ...


@runtime_checkable
class Scored(Env, Protocol):
    """An environment that can tell progress."""

    def score(self) -> float:
        """How close the task is to its solution; more is better."""
        ...


@runtime_checkable
class Concluding(Env, Protocol):
    """An environment whose reward comes at the end, also at an end that is not its own."""

    def verdict(self) -> tuple[float, bool]:
        """What is earned, and whether it is a success, where the rollout ends the episode: at its
        limit of turns, of tokens or of turns that cannot be read. Asked at most once."""
        ...


@runtime_checkable
class Goals(Env, Protocol):
    """An environment that can be explored, and whose states can be made goals.

    Its constructor takes `free`: an episode without any goal.
    """

    def goal(self) -> dict[str, Any] | None:
        """The parameters that make the state reached the goal of the task begun by `reset`.

        They replace those of the same name. None for a state that cannot be one, also where the
        task would belong to another split.
        """
        ...


@runtime_checkable
class Measurable(Env, Protocol):
    """An environment whose random and optimal policies can be computed."""

    def exact(self, max_turns: int) -> Exact:
        """The values of the task begun by `reset`, within `max_turns` actions."""
        ...


def asynchronous(env: Env | type[Env]) -> bool:
    """True if a call of the environment is to be awaited."""
    return any(inspect.iscoroutinefunction(getattr(env, part)) for part in AWAITED)


def blocks(name: str, found: type[Env]) -> bool:
    """True if calls of the environment of this name are made in a thread."""
    return getattr(found, "blocking", name not in REGISTRY and not asynchronous(found))


async def settled(value: Any) -> Any:
    """A value, or what it comes to where it is to be awaited."""
    return await value if inspect.isawaitable(value) else value


def env_class(name: str) -> type[Env]:
    """The class of a registered name or of an import path; EnvError names `env.name`."""
    path = REGISTRY.get(name, name)
    module, separator, attribute = path.partition(":")
    if not separator:
        known = ", ".join(sorted(REGISTRY))
        raise EnvError(
            f"env.name: no environment {name!r} (known: {known}; or package.module:Class)"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs whatever the module does
        raise EnvError(f"env.name: cannot import {name!r}: {_said(error)}") from error
    missing = [part for part in AWAITED if not hasattr(found, part)]
    if missing:
        raise EnvError(f"env.name: {name!r} has no {', '.join(missing)}")
    return found


def make_env(name: str, params: dict[str, Any]) -> Env:
    """An environment with these parameters; EnvError names `env.name` or `env.params.<key>`."""
    found = env_class(name)
    try:
        known = inspect.signature(found).parameters
        hints = typing.get_type_hints(found.__init__)
    except Exception as error:  # resolving annotations evaluates them
        raise EnvError(
            f"env.name: the parameters of {name!r} cannot be read: {_said(error)}"
        ) from error
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


def _said(error: Exception) -> str:
    """The type and the words of an error, on one line and without secrets."""
    return mask(" ".join(f"{type(error).__name__}: {error}".split()))


def split_of(content: bytes) -> str:
    """The split that a task belongs to by its content alone: about one in eight is for testing."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return "test" if int.from_bytes(digest, "little") % 8 == 0 else "train"


def exact(tasks: Iterable[Task], max_turns: int) -> Exact | None:
    """Mean exact values over `tasks`, or None where the environment cannot compute them.

    EnvError where it can and fails.
    """
    values = []
    for task in tasks:
        env = make_env(task.env, task.params)
        if not isinstance(env, Measurable):
            return None
        try:
            values.append(asyncio.run(_measured(env, task, max_turns)))
        except Exception as error:
            raise EnvError(
                f"env.name: {task.env!r} cannot measure {task.task_id}: {_said(error)}"
            ) from error
    return Exact(
        random=statistics.fmean(value.random for value in values),
        optimal=statistics.fmean(value.optimal for value in values),
        random_return=_mean(value.random_return for value in values),
        optimal_return=_mean(value.optimal_return for value in values),
    )


async def _measured(env: Measurable, task: Task, max_turns: int) -> Exact:
    await settled(env.reset(task, 0))
    value = env.exact(max_turns)
    await settled(env.close())
    return value


def _mean(values: Iterable[float | None]) -> float | None:
    """None where any is missing."""
    known = list(values)
    present = [value for value in known if value is not None]
    return statistics.fmean(present) if len(present) == len(known) else None
