"""Reward terms of a user's own, with TRL's signature.

    def correct(prompts, completions, answer, **columns) -> list[float | None]

Every argument is a list; here each has one entry, as an episode is scored when it ends. A prompt
and a completion are lists of messages. A function gets the arguments that it names, or all if it
has `**kwargs`. A plain function runs in a process (`workers.py`), an async one on a loop in a
thread of its own; neither runs on the actor's loop.
"""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from actors.rewards.facts import GIVEN, KNOWN, EpisodeFacts, Unscorable
from actors.rewards.term_process import made, plain
from evolver_async.extension import imported

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class OwnFunction:
    """A user's function and the names of its arguments; `any_name`: it has `**kwargs`."""

    path: str
    function: Callable[..., Any]
    names: frozenset[str]
    required: frozenset[str]
    any_name: bool

    @property
    def asynchronous(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def chosen(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the function takes."""
        return {name: x for name, x in arguments.items() if self.any_name or name in self.names}

    def missing(self, columns: Collection[str], params: Collection[str]) -> list[str]:
        """Return the arguments without a default that neither rows nor parameters have."""
        return sorted(self.required - {*KNOWN, *GIVEN, *columns, *params})


def load_function(key: str, path: str) -> OwnFunction:
    """Import a function. Raises ValueError, naming the key, for one that cannot be called."""
    found = imported(key, path)
    wanted = "(prompts, completions, **columns)"
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError) as error:  # it does not tell its parameters
        raise ValueError(f"{key}: {path!r} does not take {wanted}: {error}") from None
    kinds = [one.kind for one in parameters]
    if inspect.Parameter.POSITIONAL_ONLY in kinds or not kinds:
        raise ValueError(f"{key}: {path!r} does not take {wanted} by keyword")
    named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    return OwnFunction(
        path=path,
        function=found,
        names=frozenset(one.name for one in named),
        required=frozenset(one.name for one in named if one.default is REQUIRED),
        any_name=inspect.Parameter.VAR_KEYWORD in kinds,
    )


def arguments_of(
    own: OwnFunction, facts: EpisodeFacts, params: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the arguments of a call, and those that `term_process.py` makes where it runs."""
    steps = [run.weights.step for s in facts.trajectory.sequences for run in s.versions]
    given: dict[str, Any] = dict.fromkeys(GIVEN, max(steps, default=0))
    arguments = own.chosen(facts.arguments())
    return arguments | params, {
        name: step for name, step in own.chosen(given).items() if name not in arguments | params
    }


def value_of(returned: Any) -> float | None:
    """Return the one number in a function's result, None if it abstains. Raises Unscorable."""
    if not isinstance(returned, list) or len(returned) != 1:
        raise Unscorable(f"must return a list with one number, returned {repr(returned)[:100]}")
    (value,) = returned
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise Unscorable(f"returned {value}, which is no finite number")
    return float(value)


class AsyncThread:
    """Loop in a thread of its own, on which async functions run; started when it is needed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(
        self, own: OwnFunction, arguments: dict[str, Any], steps: dict[str, int], timeout_s: float
    ) -> tuple[Any, dict[str, float]]:
        """Return a function's result and the metrics that it logged. Raises Unscorable."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()
        metrics: dict[str, float] = {}

        async def called() -> Any:
            # a BaseException, such as SystemExit, would end the loop
            try:
                return plain(await own.function(**arguments, **made(steps, metrics)))
            except GeneratorExit:  # the loop has been stopped
                raise
            except BaseException as error:
                cancelled = isinstance(error, asyncio.CancelledError)
                problem = "" if cancelled else " ".join(f"{type(error).__name__}: {error}".split())
                raise Unscorable(f"failed: {problem or 'it was cancelled'}") from None

        future = asyncio.run_coroutine_threadsafe(called(), self._loop)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future), metrics
        except TimeoutError:
            raise Unscorable(f"did not return within {timeout_s:g} s") from None

    def close(self) -> None:
        """Stop the loop; a function that blocks it ends with the process."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
