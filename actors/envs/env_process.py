"""Environments in processes of their own (`env.isolation: process`), seen from the actor.

For what threads cannot share: libraries with state of their process, or that hold Python's lock. A
process holds several environments where there are more episodes than processes, and makes their
calls one after the other; a call that does not return in time ends its process, and with it the
episodes that share it.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import msgspec

from actors.child_process import ChildProcess
from actors.envs.base import Env, EnvError, env_class
from actors.envs.env_main import DATA
from evolver_async.env import Info, Step

START_S = 120.0  # for a process to start and to import its environment
LARGEST_REPLY = 16 << 20  # bytes
LOCAL = ("snapshot", "restore")  # their values stay in the process that made them


class EnvProcessEnded(RuntimeError):
    """The process of an environment ended, or was ended for a call that did not return."""


class EnvProcess(ChildProcess):
    """One process. `held`: environments in it; `turn`: lock of its calls, on the actor's loop."""

    def __init__(self) -> None:
        super().__init__("actors.envs.env_main", LARGEST_REPLY)
        self.held = 0
        self.turn = asyncio.Lock()
        self.end_reason = ""  # reason why it cannot be used any more
        self._lock = threading.Lock()  # a call whose caller has given up may still be in the pipe
        self._loaded: set[str] = set()

    def load(self, name: str) -> None:
        """Import an environment, which is not part of a call's time."""
        if name not in self._loaded:
            self.ask({"do": "load", "name": name}, START_S)
            self._loaded.add(name)

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the reply to a request.

        Raises what the environment raised, an error of the same name at least; EnvProcessEnded.
        """
        doing = request.get("method", request["do"])
        with self._lock:
            if self.end_reason:
                raise EnvProcessEnded(self.end_reason)
            try:
                reply = super().ask(request, timeout_s)
            except (TimeoutError, EOFError, ValueError) as error:
                status = self.kill()
                why = f"{doing} {error}" if isinstance(error, ValueError) else f"{doing} ended it"
                if isinstance(error, TimeoutError):
                    why = f"{doing} did not return within {timeout_s:g} s"
                elif status < 0:
                    why += f" by signal {-status}"
                self._note_end(why)
                raise EnvProcessEnded(self.end_reason) from None
        if "error" in reply:
            raise _raised(*reply["error"])
        return reply

    def give_up(self, why: str) -> None:
        """End the process; nothing begins in it from now on."""
        if not self.end_reason:
            self._note_end(why)
            self.end()

    def _note_end(self, why: str) -> None:
        self.end_reason = self.end_reason or f"the environment's process has ended: {why}"


class EnvProcesses:
    """The processes of one actor, `most` at a time, each started when it is first needed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._living: list[EnvProcess] = []

    def place(self) -> EnvProcess:
        """Return the process with the fewest environments, a new one if all have some and more may
        be."""
        self._living = [one for one in self._living if not one.end_reason]
        least = min(self._living, key=lambda one: one.held, default=None)
        if least is None or (least.held and len(self._living) < self.most):
            least = EnvProcess()
            self._living.append(least)
        least.held += 1
        return least

    def close(self) -> None:
        """End all processes."""
        for process in self._living:
            process.end()


class RemoteEnv(Env):
    """Environment in another process. Its class has the methods of the class found there, but those
    of `LOCAL`, so that it can do the same for a rollout."""

    remote: ClassVar[str]

    def __init__(self, process: EnvProcess, params: dict[str, Any], timeout_s: float) -> None:
        self.process, self._timeout_s = process, timeout_s
        process.load(self.remote)
        reply = process.ask({"do": "make", "name": self.remote, "params": params}, timeout_s)
        self._number = reply["made"]
        self.__dict__.update(reply["data"])

    def _called(self, method: str, arguments: list[Any]) -> Any:
        request = {"do": "call", "number": self._number, "method": method, "arguments": arguments}
        reply = self.process.ask(request, self._timeout_s)
        if "step" in reply:
            observation, reward, terminated, truncated, info = reply["step"]
            return Step(observation, reward, terminated, truncated, Info(*info))
        self.__dict__.update(reply.get("data", {}))
        value = reply["value"]
        return tuple(value) if method == "verdict" and isinstance(value, list) else value

    def close(self) -> None:
        try:
            self._called("close", [])
        finally:
            self.process.held -= 1


@lru_cache
def remote_class(name: str) -> type[RemoteEnv]:
    """Return the class whose instances play the environment of this name in another process."""
    found = env_class(name)
    methods: dict[str, Any] = {}
    for part in dir(found):
        hidden = part.startswith("_") or part in (*LOCAL, *DATA, "close")
        if not hidden and callable(getattr(found, part)):
            methods[part] = _method(part)
    return type(found.__name__, (RemoteEnv,), methods | {"remote": name})


def make_remote(
    process: EnvProcess, name: str, params: dict[str, Any], timeout_s: float
) -> RemoteEnv:
    """Make an environment in a process that `EnvProcesses.place` gave. Errors are `make_env`'s."""
    try:
        return remote_class(name)(process, params, timeout_s)
    except BaseException:
        process.held -= 1
        raise


def _method(name: str) -> Callable[..., Any]:
    def call(self: RemoteEnv, *arguments: Any) -> Any:
        return self._called(name, [msgspec.to_builtins(one) for one in arguments])

    call.__name__ = name
    return call


def _raised(name: str, text: str, trace: str) -> Exception:
    """Return an error that looks as the one that the environment raised, with its traceback."""
    if name == EnvError.__name__:
        return EnvError(text)
    error = type(name, (RuntimeError,), {})(text)
    error.add_note(trace)
    return error
