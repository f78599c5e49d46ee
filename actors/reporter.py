"""Reports of one actor to the buffer: counters, failures and the number of sampled tokens."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from actors.engines.base import Engine
from actors.envs.adapters import service_client
from actors.postprocess import ActorComponents
from evolver_async.protocol import messages
from evolver_async.transport.client import Client

REPORT_S = 1.0  # between two reports of failures


@dataclass(eq=False)
class Reporter:
    """Sender of one actor's totals; a repeated report changes nothing."""

    client: Client
    engine: Engine
    components: ActorComponents
    _generated: int = 0  # as last reported
    _service_failures: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """Report failures as they occur, at most every REPORT_S."""
        while True:
            await self.components.failures.noted.wait()
            await self.send(None)
            await asyncio.sleep(REPORT_S)

    async def send(self, timeout_s: float | None) -> None:
        """Send the counters of components and environment services, and all failures."""
        failures = self.components.failures
        failures.noted.clear()
        self._service_failures.update(service_client.drain())
        values = self.components.counters() | self._service_failures
        totals = failures.totals()
        if values or totals:
            counters = messages.Counters(values=values, failures=totals)
            await self.client.request(counters, timeout_s=timeout_s)

    def generated(self) -> int:
        """Count the ACTION tokens sampled by this process, without a judge's completed answers.

        The count never falls: a smaller one would look like a new process.
        """
        judge = self.components.judge
        sampled = int(self.engine.stats()["generated"]) - (judge.generated if judge else 0)
        self._generated = max(self._generated, sampled)
        return self._generated
