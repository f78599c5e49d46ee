"""Process that holds environments and makes their calls, one at a time: what `env_process.py`
starts.

    request    {"do": "load", "name": environment}
               {"do": "make", "name": environment, "params": {…}}
               {"do": "call", "number": of a made one, "method": name, "arguments": […]}
    reply      {"value": …}, {"step": fields of a Step}, {"made": number, "data": attributes}
               or {"error": [type, text, traceback]}

After `close` an environment is forgotten, also if that failed.
"""

import asyncio
import inspect
import traceback
from typing import Any

import msgspec

from actors.child_main import serve
from actors.envs.base import Env, env_class, make_env
from actors.envs.return_checks import checked_step
from evolver_async.schema import Task

DATA = (  # of an instance, which `actors/envs/base.py` names
    "instructions",
    "plain_instructions",
    "turn_format",
    "max_turns",
    "longest_call_s",
    "reusable",
)


class Host:
    """The environments of this process, and the loop on which its async ones run."""

    def __init__(self) -> None:
        self._made: dict[int, Env] = {}
        self._next = 0
        self._runner = asyncio.Runner()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to one request."""
        try:
            return getattr(self, f"_{request.pop('do')}")(**request)
        except BaseException as error:  # a user's code, which can raise anything, SystemExit too
            said = " ".join(str(error).split())
            return {"error": [type(error).__name__, said, traceback.format_exc()]}

    def _load(self, name: str) -> dict[str, Any]:
        env_class(name)
        return {"value": None}

    def _make(self, name: str, params: dict[str, Any]) -> dict[str, Any]:
        env = make_env(name, params)
        number, self._next = self._next, self._next + 1
        self._made[number] = env
        return {"made": number, "data": _data(env)}

    def _call(self, number: int, method: str, arguments: list[Any]) -> dict[str, Any]:
        env = self._made[number]
        if method == "close":
            del self._made[number]
        if method == "reset":
            arguments[0] = msgspec.convert(arguments[0], Task)
        value = getattr(env, method)(*arguments)
        if inspect.isawaitable(value):
            value = self._runner.run(_awaited(value))
        if method == "step":
            step = checked_step(value)
            return {"step": [*step[:4], [*step.info[:3], dict(step.info.metrics)]]}
        reply = {"value": msgspec.to_builtins(value, enc_hook=_plain)}
        return reply | {"data": _data(env)} if method == "reset" else reply


def _data(env: Env) -> dict[str, Any]:
    found = {name: getattr(env, name) for name in DATA if hasattr(env, name)}
    return msgspec.to_builtins(found, enc_hook=_plain)


async def _awaited(value: Any) -> Any:
    return await value


def _plain(value: Any) -> Any:
    """Return numbers and arrays of numpy as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot leave the environment's process")


if __name__ == "__main__":
    serve(Host().answer)
