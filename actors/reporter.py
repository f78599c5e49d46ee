"""Reports of one actor to the buffer: counters, failures and the number of sampled tokens."""

import asyncio
from collections import Counter

from actors.engines.base import Engine
from actors.envs.adapters import service_client
from actors.postprocess import ActorComponents
from evolver_async.protocol import messages
from evolver_async.transport.client import Client

REPORT_S = 1.0  # between two reports of failures


class Reporter:
    """Sender of one actor's totals; a repeated report changes nothing."""

    def __init__(self, client: Client, engine: Engine, components: ActorComponents) -> None:
        self._client = client
        self._engine = engine
        self._components = components
        self._generated = 0  # as last reported
        self._service_failures: Counter[str] = Counter()

    async def run(self) -> None:
        """Report failures as they occur, at most every REPORT_S."""
        while True:
            await self._components.failures.noted.wait()
            await self.send(None)
            await asyncio.sleep(REPORT_S)

    async def send(self, timeout_s: float | None) -> None:
        """Send the counters of components and environment services, and all failures."""
        failures = self._components.failures
        failures.noted.clear()
        self._service_failures.update(service_client.drain())
        values = self._components.counters() | self._service_failures
        totals = failures.totals()
        if values or totals:
            counters = messages.Counters(values=values, failures=totals)
            await self._client.request(counters, timeout_s=timeout_s)

    def generated(self) -> int:
        """Count the ACTION tokens sampled by this process, without a judge's completed answers.

        The count never falls: a smaller one would look like a new process.
        """
        judge = self._components.judge
        sampled = int(self._engine.stats()["generated"]) - (judge.generated if judge else 0)
        self._generated = max(self._generated, sampled)
        return self._generated
