"""Reports of one actor to the buffer: counters, failures and the number of sampled tokens."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from actors.adapters import service_client
from actors.engines.engine import Engine
from actors.postprocess import ActorComponents
from actors.weights.arrival import ArrivalCheck
from evolver_async.metrics.gauges import FIRST_S, PERIOD_S, ProcessGauges
from evolver_async.wire import messages
from evolver_async.wire.client import Client

REPORT_S = 1.0  # between two reports of failures
ENGINE = (  # of an engine's `stats`, what is reported of one in processes of its own
    *("reused", "prefilled", "stale", "pause_s", "restarts", "preemptions", "waiting", "kv_use"),
)


@dataclass(eq=False)
class Reporter:
    """Sender of one actor's totals; a repeated report changes nothing."""

    client: Client
    engine: Engine
    components: ActorComponents
    arrival: ArrivalCheck
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # a ticket
    _generated: int = 0  # as last reported
    _gauges: dict[str, float] = field(default_factory=dict)  # not sent yet
    _service_failures: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """Report failures as they occur, at most every REPORT_S, and gauges every PERIOD_S.

        In a serial run all actors are one process, which has gauges. Its clock hardly moves, so the
        counters follow every ticket.
        """
        if getattr(asyncio.get_running_loop(), "virtual", False):
            await asyncio.gather(self._report_failures(), self._report_tickets())
        else:
            await asyncio.gather(self._report_failures(), self._report_gauges())

    async def _report_failures(self) -> None:
        while True:
            await self.components.failures.noted.wait()
            await self.send(None)
            await asyncio.sleep(REPORT_S)

    async def _report_tickets(self) -> None:
        while True:
            await self.ended.wait()
            self.ended.clear()
            await self.send(None)

    async def _report_gauges(self) -> None:
        gauges, pause_s = ProcessGauges(), FIRST_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = PERIOD_S
            self._gauges = gauges.sample()
            await self.send(None)

    async def send(self, timeout_s: float | None) -> None:
        """Send the counters of components and environment services, all failures, and once the
        first reply."""
        failures = self.components.failures
        failures.noted.clear()
        self._service_failures.update(service_client.drain())
        values = self.components.counters() | self.arrival.counters() | self._service_failures
        stats = self.engine.stats()
        if "restarts" in stats:
            values |= {f"engine/{name}": stats[name] for name in ENGINE}
        totals = failures.totals()
        gauges, self._gauges = self._gauges, {}
        first, self.components.first_reply.text = self.components.first_reply.text, ""
        if values or totals or gauges or first:
            counters = messages.Counters(
                values=values, failures=totals, gauges=gauges, first_reply=first
            )
            await self.client.request(counters, timeout_s=timeout_s)

    def generated(self) -> int:
        """Count the ACTION tokens sampled by this process, without a judge's completed answers.

        The count never falls: a smaller one would look like a new process.
        """
        judge = self.components.judge
        sampled = int(self.engine.stats()["generated"]) - (judge.generated if judge else 0)
        self._generated = max(self._generated, sampled)
        return self._generated
