"""Environment of one episode, with timed calls and deadlines.

Where it may block, a thread of its own makes all calls, so that none waits for another episode's;
not in a serial run, where the virtual clock would run past all deadlines while a thread works. What
is async is awaited on the loop. An environment in another process is called by such a thread, too;
episodes that share the process wait for each other outside their deadlines. What a call raises, a
missed deadline too, is an EnvironmentFailure that names environment, task, member, what it was
doing and for how long. A failure of `close` is noted only: the episode has ended, and its result
stands.
"""

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from actors.envs.base import (
    Env,
    EnvironmentFailure,
    Located,
    Tooled,
    env_class,
    isolation_of,
    make_env,
    settled,
)
from actors.envs.env_process import EnvProcess, EnvProcesses, RemoteEnv, make_remote
from actors.envs.return_checks import (
    Opening,
    checked_goal,
    checked_opening,
    checked_score,
    checked_step,
    checked_tools,
    checked_verdict,
    text,
)
from actors.envs.tool_server import ToolServer
from actors.failure_counts import FailureCounts
from actors.formats.chat import encodable
from actors.formats.tool_calls import ANSWER_TOOL, ToolInvocation, called
from actors.formats.turns import TurnFormat, callable_tools
from actors.ticket_progress import TicketProgress
from evolver_async.env import Info, Step
from evolver_async.extension import RAISED
from evolver_async.metrics.activity import BLOCKING, STEPPING
from evolver_async.schema import Task, Ticket

R = TypeVar("R")
CLOSE_S = 1.0  # for which an episode waits for its environment's `close`
IDLE = 64  # reusable environments that an actor keeps between episodes

_closing: set[asyncio.Future[None]] = set()  # closes of abandoned environments

log = logging.getLogger(__name__)


class TimedEnvironment:
    """Environment of one member. `spent_s`: seconds of all its calls, injected latency included.

    `said`: text of the last message of its user, or of its last observation, as tokenizers can read
    it; `valid`: False if the last action did not exist.
    """

    env: Env
    said: str = ""
    valid: bool = True

    def __init__(
        self,
        ticket: Ticket,
        member: int,
        timeout_s: float,
        progress: TicketProgress,
        failures: FailureCounts | None = None,
        idle: "IdleEnvironments | None" = None,
        isolation: str = "auto",
        server: ToolServer | None = None,
    ) -> None:
        self.spent_s = 0.0
        self._failures = failures or FailureCounts()
        self._idle = idle or IdleEnvironments()
        self._isolation = isolation
        self._server = server
        self._task = ticket.task
        self._member = member
        self._timeout_s = timeout_s
        self._progress = progress
        self._thread: _Thread | None = None
        self._process: EnvProcess | None = None
        self._last: Future[Any] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the environment, without waiting for it after an error."""
        if kind is None:
            await self.close()
        else:
            self.abandon()

    async def open(self) -> None:
        """Make the environment, or take an idle one of the same parameters."""
        name, params = self._task.env, self._task.params
        if (held := self._idle.take(name, params)) is not None:
            self.env, self._thread = held
            self._process = self.env.process if isinstance(self.env, RemoteEnv) else None
            return
        making = "making the environment"
        found = await self.call(making, env_class, name)
        isolation = isolation_of(name, found, self._isolation)
        if isolation != "loop" and not getattr(asyncio.get_running_loop(), "virtual", False):
            self._thread = _Thread(name)
        if isolation != "process":
            self.env = await self.call(making, make_env, name, params)
            return
        self._process = await self._loaded(name)
        place = self._process, name, params, self._timeout_s
        self.env = await self.call(making, make_remote, *place)

    async def _loaded(self, name: str) -> EnvProcess:
        """Return a process that has imported the environment, which has a deadline of its own."""
        process = self._idle.processes.place()
        try:
            if self._thread is None:
                process.load(name)
            else:
                async with process.turn:
                    await asyncio.wrap_future(self._thread.call(process.load, name))
        except BaseException as error:
            process.held -= 1
            if isinstance(error, RAISED) and not own_cancellation(error):
                raise self.failure("starting its process", 0.0, error) from error
            raise
        return process

    async def call(
        self, doing: str, function: Callable[..., Any], *args: object, latency_s: float = 0
    ) -> Any:
        """Return the result of `function`; `latency_s` is slept before and counts as its time."""
        return await self._noted(doing, partial(self._timed, function, args, latency_s))

    async def _noted(self, doing: str, work: Callable[[], Awaitable[R]]) -> R:
        """Return the result of `work`, whose exceptions become this member's failure."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            stepping = self._progress.clock.during(STEPPING)
            with stepping, self._progress.during(self._member, doing):
                return await work()
        except (*RAISED, asyncio.CancelledError) as error:
            if own_cancellation(error):
                raise
            raise self.failure(doing, loop.time() - began, error) from error
        finally:
            self.spent_s += loop.time() - began

    async def reset(self, task: Task, dynamics_seed: int) -> Opening:
        """Return the first messages."""
        seen = await self.call("reset", self.env.reset, task, dynamics_seed)
        opening = self._checked("reset", checked_opening, seen)
        self.said, self.valid = encodable(opening.user), True
        return opening

    async def step(self, action: str, latency_s: float = 0, doing: str = "step") -> Step:
        """Return the result of an action. A call of one of the server's tools never reaches the
        environment, and for one without tools an answer is the action."""
        if self._server is not None:
            call = called(action)
            if call.name in self._server.names:
                work = partial(self._served, self._server, call, latency_s)
                return await self._noted(f"tool {call.name}", work)
            if call.name == ANSWER_TOOL and not isinstance(self.env, Tooled):
                action = call.arguments["text"]
        found = await self.call(doing, self.env.step, action, latency_s=latency_s)
        step = self._checked(doing, checked_step, found)
        self.said, self.valid = encodable(step.observation), step.info.valid
        return step

    async def tools(self, style: TurnFormat) -> list[dict[str, Any]]:
        """Return the tools that turns of this format can call in the task begun, the environment's
        and the server's; [] if there are none."""
        if not style.tools:
            return []
        specs = list[dict[str, Any]]()
        if isinstance(self.env, Tooled):
            specs = self._checked("tools", checked_tools, await self.call("tools", self.env.tools))
        if self._server is not None:
            specs = [*specs, *await self._noted("tools", self._server.tools)]
        return callable_tools(style, self._checked("tools", checked_tools, specs))

    async def verdict(self, verdict: Callable[[], Any]) -> tuple[float, bool]:
        """Return reward and success of an episode that the rollout ends."""
        return self._checked("verdict", checked_verdict, await self.call("verdict", verdict))

    async def score(self, score: Callable[[], Any]) -> float:
        """Return the environment's score of its current state."""
        return self._checked("score", checked_score, await self.call("score", score))

    async def goal(self, goal: Callable[[], Any]) -> dict[str, Any] | None:
        """Return the parameters that make the current state a task's goal; None if it is none."""
        return self._checked("goal", checked_goal, await self.call("goal", goal))

    async def state(self, observed: str) -> str:
        """Return the environment's name of the present state, or else what was observed."""
        env = self.env
        return await self.text("state", env.state) if isinstance(env, Located) else observed

    async def text(self, name: str, function: Callable[[], Any]) -> str:
        """Return what a method of this name says, as tokenizers and keys can read it."""
        said = await self.call(name, function)
        return encodable(self._checked(name, partial(text, name), said))

    def _checked(self, doing: str, check: Callable[[object], R], found: object) -> R:
        try:
            return check(found)
        except (TypeError, ValueError) as error:
            raise self.failure(doing, 0.0, error) from error

    async def _timed(
        self, function: Callable[..., Any], args: tuple[object, ...], latency_s: float
    ) -> Any:
        async with self._process.turn if self._process else contextlib.nullcontext():
            return await self._timed_alone(function, args, latency_s)

    async def _timed_alone(
        self, function: Callable[..., Any], args: tuple[object, ...], latency_s: float
    ) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        at_once = self._thread is None and latency_s <= 0
        found = self._blocking(function, args) if at_once else None
        if not at_once or inspect.isawaitable(found):  # else no timer could cut it short
            try:
                async with asyncio.timeout_at(deadline) as limit:
                    if latency_s > 0:
                        await asyncio.sleep(latency_s)
                    if self._thread is not None:
                        self._last = self._thread.call(function, *args)
                        return await settled(await asyncio.wrap_future(self._last))
                    found = await settled(found if at_once else self._blocking(function, args))
            except TimeoutError:
                if limit.expired():
                    if self._process is not None:  # no other episode may begin in it
                        self._process.give_up(f"a call of member {self._member} did not return")
                    raise self._missed() from None
                raise
        if loop.time() > deadline:  # it held up the loop, so that nothing could cut it short
            raise self._missed()
        return found

    async def _served(self, server: ToolServer, call: ToolInvocation, latency_s: float) -> Step:
        """Return what a tool of the server says. A connection has a deadline of its own."""
        await server.connect()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await asyncio.sleep(latency_s)
                result = await server.call(call.name, call.arguments)
        except TimeoutError:
            if limit.expired():
                raise self._missed() from None
            raise
        return Step(result.text, 0.0, False, False, Info(tool_error=result.failed))

    def _blocking(self, function: Callable[..., Any], args: tuple[object, ...]) -> Any:
        with self._progress.clock.during(BLOCKING):
            return function(*args)

    def _missed(self) -> TimeoutError:
        return TimeoutError(f"env.step_timeout_s is {self._timeout_s:g}")

    def failure(self, doing: str, seconds: float, cause: BaseException) -> EnvironmentFailure:
        """Return the failure with its task, member, activity and duration."""
        where = f"task {self._task.task_id}, member {self._member}: {doing} for {seconds:.1f} s"
        return EnvironmentFailure(self._task.env, where, doing, cause)

    async def close(self) -> None:
        """Keep a reusable environment for a later episode; close another, and wait for it for a
        moment. An environment that hangs in a call is closed when that returns."""
        if self._last is not None and not self._last.done():
            return self.abandon()
        if not hasattr(self, "env"):
            if self._thread is not None:
                self._thread.end()
            return
        if getattr(self.env, "reusable", False):
            self._idle.keep(self._task.env, self._task.params, self.env, self._thread)
            return
        closing = asyncio.ensure_future(self._noted_close())
        _keep(closing)
        await asyncio.wait({closing}, timeout=CLOSE_S)

    async def _noted_close(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await self._timed(self.env.close, (), 0.0)
        except (*RAISED, asyncio.CancelledError) as error:
            if own_cancellation(error):
                raise
            failure = self.failure("environment close", loop.time() - began, error)
            log.warning("%s; its episode stands", failure)
            self._failures.note(failure.kind, failure.name, failure.error)
        finally:
            if self._thread is not None:
                self._thread.end()

    def abandon(self) -> None:
        """Close the environment without waiting if a thread can do it."""
        if hasattr(self, "env"):
            if inspect.iscoroutinefunction(self.env.close):
                _keep(asyncio.create_task(self._closed(self.env.close)))
            elif self._thread is not None:
                _keep(asyncio.wrap_future(self._thread.call(self.env.close)))
            else:
                # What went wrong before is what counts.
                with contextlib.suppress(*RAISED, asyncio.CancelledError):
                    self.env.close()
        if self._thread is not None:
            self._thread.end()

    async def _closed(self, close: Callable[[], Awaitable[None]]) -> None:
        with contextlib.suppress(*RAISED):
            async with asyncio.timeout(self._timeout_s):
                await close()


class IdleEnvironments:
    """Environments between two episodes, whose class says `reusable = True`: their next `reset`
    begins anew. The one used last is taken first; the oldest beyond `IDLE` is closed.

    `processes`: those of an actor's environments, which stay for later ones.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes = EnvProcesses(processes)
        self._held: list[tuple[tuple[str, dict[str, Any]], Env, _Thread | None]] = []

    def take(self, name: str, params: dict[str, Any]) -> "tuple[Env, _Thread | None] | None":
        """Return an idle environment with its thread; None if there is none like it."""
        for index in range(len(self._held) - 1, -1, -1):
            if self._held[index][0] == (name, params):
                return self._held.pop(index)[1:]
        return None

    def keep(self, name: str, params: dict[str, Any], env: Env, thread: "_Thread | None") -> None:
        """Keep an environment whose episode has ended well."""
        self._held.append(((name, params), env, thread))
        if len(self._held) > IDLE:
            self._close(*self._held.pop(0)[1:])

    def close(self) -> None:
        """Begin to close all; see `abandoned_closed`."""
        while self._held:
            self._close(*self._held.pop()[1:])

    def _close(self, env: Env, thread: "_Thread | None") -> None:
        if inspect.iscoroutinefunction(env.close):
            _keep(asyncio.ensure_future(env.close()))
        elif thread is not None:
            _keep(asyncio.wrap_future(thread.call(env.close)))
            thread.end()
        else:
            with contextlib.suppress(*RAISED):
                env.close()


async def abandoned_closed(timeout_s: float) -> None:
    """Wait until abandoned environments are closed, for at most `timeout_s`."""
    loop = asyncio.get_running_loop()
    if closing := [one for one in _closing if one.get_loop() is loop]:
        _, late = await asyncio.wait(closing, timeout=timeout_s)
        if late:
            log.warning("%d environments did not close within %g s", len(late), timeout_s)


def _keep(closing: "asyncio.Future[None]") -> None:
    _closing.add(closing)
    closing.add_done_callback(_forget)


def _forget(closing: "asyncio.Future[None]") -> None:
    """Drop a finished close with its exception: what went wrong before is what counts."""
    _closing.discard(closing)
    if not closing.cancelled():
        closing.exception()


class _Thread:
    """Thread that makes calls one after the other. Unlike with an executor, nothing waits for a
    hanging call, not even the end of the process."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[object, ...]] | None]
        self._calls = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[..., Any], *args: object) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, function, args))
        return future

    def end(self) -> None:
        """Accept no calls after those already made."""
        self._calls.put(None)

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            future, function, args = asked
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except (SystemExit, KeyboardInterrupt) as error:  # they would end the process
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
            except BaseException as error:
                future.set_exception(error)


def own_cancellation(error: BaseException) -> bool:
    """Return True if the error cancels the running task.

    A CancelledError that a user's code raises is False: it would end the task without a failure.
    """
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
