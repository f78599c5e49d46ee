"""The whole system in one cooperative loop under a virtual clock: same seed, same numbers.

Buffer, actors and learner are the same code as in the local launcher, connected by the in-process
transport. The clock moves a little with every request of the learner, does not move while anything
else computes, and jumps to the next timer when nothing does: environment latency, leases and
deadlines behave as always and cost no real time.
"""

import asyncio
import logging
import math
import selectors
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from evolver_async.buffer.service import BufferService
from evolver_async.config import Config
from evolver_async.errors import STOPPED
from evolver_async.launch.registry import resolve
from evolver_async.model.tokenizer import tokenizer_hash
from evolver_async.process.private_directories import claim, sweep
from evolver_async.process.rendezvous import make_weights_dir
from evolver_async.process.stopping import handled_by, raise_stop
from evolver_async.wire.in_process import LocalClient, LocalServer
from evolver_async.wire.messages import Counters

T = TypeVar("T")

log = logging.getLogger(__name__)

STOP_S = 2.0  # a stop moves the clock beyond the time for which the learner waits unasked
WORK_S = 0.5  # at most between two requests of the learner; more is a standstill to the buffer
TICK_S = 1e-9  # asyncio may fire a timer early by this much; waiting for the rest must end as well


class _JumpSelector(selectors.SelectSelector):
    """Selector that never sleeps: waiting for `timeout` seconds moves the clock by that much."""

    now = 0.0
    look_due = math.inf  # in real time
    look: Callable[[], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if time.perf_counter() >= self.look_due:
            self.look()
        if timeout is None:
            raise RuntimeError(
                "the serial run cannot continue: no timer is set and every task waits"
            )
        self.now += max(TICK_S, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Asyncio loop whose `time()` is virtual, in seconds from 0.

    Before each run of the loop the clock moves by `work_s`, as the learner works between two of
    them. A clock that stood still while an actor computes at every request of the learner would let
    no actor look for new weights, and no version would be evaluated.

    It cannot wait for threads: code that would use one tests `virtual` and makes the call itself.
    """

    virtual = True

    def __init__(self, work_s: float = 0.0) -> None:
        self._clock = _JumpSelector()
        self._work_s = work_s
        self._advanced_s = 0.0  # beside the clock: a signal can come while that is moved
        self._ran_s = 0.0
        self._report_s = math.inf
        self._entered: float | None = None
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now + self._advanced_s

    def advance(self, seconds: float) -> None:
        """Move the clock, which stands still while something always computes; for a signal."""
        self._advanced_s += seconds

    def report(self, every_s: float, look: Callable[[float], None]) -> None:
        """Call `look` with the real seconds of a run of the loop, every `every_s` of them."""

        def due() -> None:
            assert self._entered is not None
            self._clock.look_due = time.perf_counter() + every_s
            look(time.perf_counter() - self._entered)

        self._report_s, self._clock.look = every_s, due

    def run_forever(self) -> None:
        self._clock.now += self._work_s
        self._entered = time.perf_counter()
        self._clock.look_due = self._entered + self._report_s
        try:
            super().run_forever()
        finally:
            self._ran_s, self._entered = self.ran_s(), None

    def ran_s(self) -> float:
        """Return the real seconds for which the loop has run."""
        running_s = 0.0 if self._entered is None else time.perf_counter() - self._entered
        return self._ran_s + running_s


class InProcessExperience:
    """The experience service in this loop; it sends the buffer its counters at every change."""

    def __init__(self, config: Config, run_dir: Path, buffer: LocalServer) -> None:
        self._to_buffer = LocalClient(buffer, "experience")
        self._sending: set[asyncio.Task[Any]] = set()
        self._service = resolve("serial_experience")(config, run_dir, self._send)
        self._server = LocalServer(self._service, run_dir.name)

    def client(self, name: str) -> LocalClient:
        """Return a connection for the actor of this name."""
        return LocalClient(self._server, name)

    def close(self) -> None:
        self._server.close()
        self._service.close()
        self._to_buffer.close()

    def _send(self, counters: Counters) -> None:
        task = asyncio.create_task(self._to_buffer.request(counters))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


def run(config: Config, run_dir: Path) -> int:
    """Train in this process, in a run directory made by `creation.create`; return the exit code."""
    sweep(Path(config.weights.dir))
    claimed = claim(make_weights_dir(config, run_dir))
    try:
        return _train(config, run_dir)
    finally:
        claimed.remove()


def _log_waits(service: BufferService, warn_s: float, waited_s: float) -> None:
    """Log the learner's wait after 1, 2, 4, 8 … times `warn_s`."""
    times = round(waited_s / warn_s)
    if times & (times - 1):
        return
    for reason in service.activity.learner_reasons():
        log.warning("the learner has waited for %.0f s: %s", waited_s, reason)


def _train(config: Config, run_dir: Path) -> int:
    """Train. At the first stop signal the learner saves what it has; the second ends it at once."""
    asyncio.set_event_loop(loop := VirtualLoop(min(config.actors.poll_s, WORK_S)))
    service = BufferService.of_run(config, run_dir, tokenizer_hash(config.policy.path), now=0.0)
    loop.report(config.buffer.warn_s, partial(_log_waits, service, config.buffer.warn_s))
    address = service.welcome.weights_address
    server = LocalServer(service, run_dir.name)
    experience = InProcessExperience(config, run_dir, server) if config.experience.pooled else None
    build_actor = resolve("serial_actor")

    async def start() -> list[asyncio.Task[Any]]:
        server.start()
        tasks = []
        for index in range(config.actors.count):
            name = f"actor-{index}"
            own = None if experience is None else experience.client(name)
            client = LocalClient(server, name)
            worker = build_actor(config, client, address, name, 0, own, run_dir)
            tasks.append(asyncio.create_task(worker.run(), name=name))
        return tasks

    tasks: list[asyncio.Task[Any]] = []

    def call(request: Coroutine[Any, Any, T]) -> T:
        """Run the loop until the learner's request is answered. An ended actor ends the run."""
        answer = loop.run_until_complete(request)
        for task in tasks:
            if task.done():
                task.result()
                raise RuntimeError(f"{task.get_name()} ended before the learner did")
        return answer

    # at least the incarnation of a learner that another launcher started
    client = LocalClient(server, "learner", service.store.replay.at.incarnation)
    learner = resolve("serial_learner")(config, run_dir, client, call)
    signals: list[int] = []

    def stop(number: int) -> None:
        signals.append(number)
        learner.requests.stopping = True
        loop.advance(STOP_S)
        if len(signals) > 1:
            raise_stop(number)

    try:
        with handled_by(stop):
            tasks += loop.run_until_complete(start())
            code = learner.run()
        return 128 + signals[0] if signals and code == STOPPED else code
    finally:
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        learner.close()
        if experience is not None:
            experience.close()
        server.close()
        service.close()
        loop.close()
