"""LEASE of an actor, and the news of weights that may grant it while it is parked.

The buffer grants no ticket that demands weights which this actor has not held. A few kinds of
weights it only has to be able to fetch (`evolver_async.buffer.actor_weights`).
"""

import asyncio
from dataclasses import dataclass

from actors.engines.weight_sync import WeightSync
from evolver_async.metrics.activity import LEASING, ActivityClock
from evolver_async.schema import WeightId
from evolver_async.wire import messages
from evolver_async.wire.client import Client


class ActorReplaced(RuntimeError):
    """Another process holds the name of this actor, or the run has been launched anew since it
    joined; the message says which."""


@dataclass(eq=False)
class LeaseRequest:
    """Sender of LEASE, and of a RENEW without tickets when weights change meanwhile.

    `launch`: number of the launch that the actor has joined.
    """

    client: Client
    adoption: WeightSync
    clock: ActivityClock
    poll_s: float
    launch: int = 0
    _parked: bool = False
    _reported: tuple[WeightId | None, WeightId | None] = None, None

    async def send(
        self, credit: int, groups: set[int], generated: int
    ) -> messages.Tickets | messages.Wait:
        """Ask for tickets of up to `credit` members beside those of these groups.

        Raise ActorReplaced.
        """
        self._reported = weights, visible = self.adoption.seen
        lease = messages.Lease(
            credit=credit,
            groups=sorted(groups),
            weights=weights,
            visible=visible,
            generated=generated,
            seconds=self.clock.totals(),
            launch=self.launch,
        )
        with self.clock.during(LEASING):
            self._parked = True
            reply = await self.client.request(lease)
            self._parked = False
        if isinstance(reply, messages.Fenced):
            raise ActorReplaced(reply.reason)
        return reply

    async def announce(self) -> None:
        """Report new weights while a LEASE is parked: it may be granted with them."""
        while True:
            await asyncio.sleep(self.poll_s)
            if not self._parked or self.adoption.seen == self._reported:
                continue
            self._reported = weights, visible = self.adoption.seen
            news = messages.Renew(progress={}, weights=weights, visible=visible)
            news.seconds, news.launch = self.clock.totals(), self.launch
            reply = await self.client.request(news)
            if isinstance(reply, messages.Fenced):
                raise ActorReplaced(reply.reason)
