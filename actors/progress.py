"""What has been done for a ticket, and what each of its members is doing now and since when."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class TicketProgress:
    """One ticket's. Times are the loop's.

    `count`: tokens and environment steps; the lease is renewed while it grows. `queued`: the ticket
    waits for others of this actor, so theirs is its progress too. `played`: members whose episode
    is over. `last`: what a member did last, and for how many seconds.
    """

    def __init__(self) -> None:
        self.count = 0
        self.queued = False
        self.played = 0
        self.last: dict[int, tuple[str, float]] = {}
        self._doing: dict[int | None, tuple[str, float]] = {}

    @contextmanager
    def during(self, member: int | None, what: str) -> Iterator[None]:
        """Something that takes a while; of all members where none is named."""
        before = self._doing.get(member)
        began = asyncio.get_running_loop().time()
        self._doing[member] = (what, began)
        try:
            yield
        finally:
            if member is not None:
                self.last[member] = (what, asyncio.get_running_loop().time() - began)
            del self._doing[member]
            if before is not None:
                self._doing[member] = before

    def slowest(self) -> tuple[str, float]:
        """What goes on for longest, in words that name its member, and its seconds."""
        if not self._doing:
            return "nothing", 0.0
        member, (what, since) = min(self._doing.items(), key=lambda item: item[1][1])
        seconds = asyncio.get_running_loop().time() - since
        whose = "" if member is None else f"member {member}: "
        return f"{whose}{what} for {seconds:.1f} s", seconds
