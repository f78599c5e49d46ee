"""The whole system in one cooperative loop under a virtual clock: same seed, same numbers.

Buffer, actors and learner are the same code as in the other launchers, joined by the in-process
twin of the transport. Time stands still while anything computes and jumps to the next timer when
nothing does, so environment latency, leases and deadlines behave as always and cost nothing.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from evolver_async.buffer.service import BufferService
from evolver_async.config import Config
from evolver_async.launch.registry import resolve
from evolver_async.model.tokenizer import tokenizer_hash
from evolver_async.process.addresses import make_weights_dir
from evolver_async.process.private_directories import claim, sweep
from evolver_async.protocol.messages import Counters
from evolver_async.transport.in_process import LocalClient, LocalServer

T = TypeVar("T")


TICK_S = 1e-9  # asyncio lets a timer go this early: who then waits for the rest must get there


class _JumpSelector(selectors.SelectSelector):
    """A selector that never sleeps: waiting for `timeout` seconds moves the clock by as much."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("serial run stands still: no timer is set and nobody can move")
        self.now += max(TICK_S, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose `time()` is virtual, in seconds from 0.

    It waits for no thread, so who would call one asks for `virtual` and makes the call itself.
    """

    virtual = True

    def __init__(self) -> None:
        self._clock = _JumpSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class Navigating:
    """The experience service in this loop; the buffer hears its counters whenever they change."""

    def __init__(self, config: Config, run_dir: Path, buffer: LocalServer) -> None:
        self._to_buffer = LocalClient(buffer, "experience")
        self._telling: set[asyncio.Task[Any]] = set()
        self._service = resolve("serial_experience")(config, run_dir, self._tell)
        self._server = LocalServer(self._service, run_dir.name)

    def client(self, name: str) -> LocalClient:
        """A connection for the actor of this name."""
        return LocalClient(self._server, name)

    def close(self) -> None:
        self._server.close()
        self._service.close()
        self._to_buffer.close()

    def _tell(self, counters: Counters) -> None:
        task = asyncio.create_task(self._to_buffer.request(counters))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


def run(config: Config, run_dir: Path) -> int:
    """Train in this process, in a run directory made by `directory.create`; the exit code."""
    sweep(Path(config.weights.dir))
    claimed = claim(make_weights_dir(config, run_dir))
    try:
        return _train(config, run_dir)
    finally:
        claimed.remove()


def _train(config: Config, run_dir: Path) -> int:
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    service = BufferService.of_run(config, run_dir, tokenizer_hash(config.policy.path), now=0.0)
    address = service.welcome.weights_address
    server = LocalServer(service, run_dir.name)
    navigating = None if config.experience.kind == "none" else Navigating(config, run_dir, server)
    build_actor = resolve("serial_actor")
    build_learner = resolve("serial_learner")

    async def start() -> list[asyncio.Task[Any]]:
        server.start()
        tasks = []
        for index in range(config.actors.count):
            name = f"actor-{index}"
            experience = None if navigating is None else navigating.client(name)
            worker = build_actor(config, LocalClient(server, name), address, name, 0, experience)
            tasks.append(asyncio.create_task(worker.run(), name=name))
        return tasks

    tasks: list[asyncio.Task[Any]] = []

    def call(request: Coroutine[Any, Any, T]) -> T:
        """Run the loop until the learner's request is answered; an actor that died ends the run."""
        answer = loop.run_until_complete(request)
        for task in tasks:
            if task.done():
                task.result()
                raise RuntimeError(f"{task.get_name()} ended before the learner did")
        return answer

    # not lower than that of a learner that another launcher started
    client = LocalClient(server, "learner", service.store.replay.at.incarnation)
    learner = build_learner(config, run_dir, client, call)
    try:
        tasks += loop.run_until_complete(start())
        return learner.run()
    finally:
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        learner.close()
        if navigating is not None:
            navigating.close()
        server.close()
        service.close()
        loop.close()
