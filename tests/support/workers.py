"""An actor beside a buffer and an engine that tests control."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from rollouts import CHAT, RIGHT, FakeEngine, corridor

from actors.engines.engine import Generation, Request
from actors.postprocess import ActorComponents
from actors.weights.source import FetchedWeights
from actors.worker import Worker
from evolver_async.config import Config, StageConfig
from evolver_async.launch.serial import VirtualLoop
from evolver_async.schema import Ticket, WeightId
from evolver_async.weights.shm import ShmPublisher, ShmReceiver
from evolver_async.wire import messages
from evolver_async.wire.in_process import LocalClient, LocalServer


def version(step: int) -> WeightId:
    return WeightId(lineage=1, step=step)


class Walker(FakeEngine):
    """Always walks right; `failure` is raised instead, `pause_s` comes before."""

    def __init__(self, failure: Exception | None = None, pause_s: float = 0.0) -> None:
        super().__init__({})
        self.failure = failure
        self.pause_s = pause_s

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(self.pause_s)
        if self.failure is not None:
            raise self.failure
        tokens = CHAT.tokens_of(RIGHT)
        assert self.weights is not None
        weights = [self.weights] * len(tokens)
        return Generation(tokens=tokens, logprobs=[-1.0] * len(tokens), weights=weights)


class Buffer:
    """Grants the tickets it was given, each at its time, and writes down all requests."""

    def __init__(self, *tickets: tuple[float, Ticket], refuses: str = "") -> None:
        self.tickets = list(tickets)
        self.refuses = refuses
        self.requests: list[Any] = []
        self.leases: list[messages.Lease] = []  # that ask for tickets

    def handle(self, peer: str, request: Any, now: float) -> list[messages.Reply]:
        if isinstance(request, messages.Lease) and request.credit > 0:
            self.leases.append(request)
            due = [ticket for at, ticket in self.tickets if at <= now]
            self.tickets = [(at, ticket) for at, ticket in self.tickets if at > now]
            return [messages.Tickets(tickets=due) if due else messages.Wait(reason="none")]
        self.requests.append(request)
        if isinstance(request, messages.Push):
            reject = messages.Reject(reason=self.refuses)
            return [reject if self.refuses else messages.Ack()]
        return [messages.Ok()]

    def commit(self) -> None: ...

    def tick(self, now: float) -> None: ...

    @property
    def credits(self) -> list[int]:
        return [lease.credit for lease in self.leases]

    def seen(self, kind: type) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Runs a worker against a buffer, for a time or until it ends by itself."""
    loop = VirtualLoop()
    publisher = ShmPublisher(tmp_path / "w", background=False)
    publisher.publish(version(1), {"w": torch.zeros(1)})

    def run(
        buffer: Buffer,
        engine: FakeEngine,
        seconds: float,
        components: ActorComponents | None = None,
        groups: int = 8,
        questioning: str = "none",
        episode_timeout_s: float = 600.0,
    ) -> None:
        async def play() -> None:
            server = LocalServer(buffer, "run")
            server.start()
            worker = worker_of(
                LocalClient(server, "actor-0"),
                engine,
                publisher,
                groups=groups,
                group_size=2,
                components=components,
                episode_timeout_s=episode_timeout_s,
            )
            worker.config.questioning.kind = questioning
            loop.call_later(seconds, worker.stop.set)
            await worker.run()
            server.close()

        loop.run_until_complete(play())

    yield run
    publisher.close()
    loop.close()


def worker_of(
    client: Any,
    engine: FakeEngine,
    publisher: ShmPublisher,
    lag: int = 0,
    step_timeout_s: float = 30.0,
    episode_timeout_s: float = 600.0,
    groups: int = 8,
    group_size: int = 8,
    stages: list[StageConfig] | None = None,
    components: ActorComponents | None = None,
) -> Worker:
    config = Config(stages=stages or [StageConfig(kind="sft", steps=5)])
    config.actors.groups, config.rollout.group_size = groups, group_size
    config.actors.weight_lag = lag
    config.env.step_timeout_s = step_timeout_s
    config.env.episode_timeout_s = episode_timeout_s
    source = FetchedWeights(ShmReceiver(publisher.address), engine)
    return Worker(config, client, source, engine, CHAT, "actor-0", 0, components)


def granted(changes: dict[str, Any] | None = None, **params: Any) -> Ticket:
    return replace(corridor(members=2, **params), **(changes or {}))
