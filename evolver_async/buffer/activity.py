"""Who was heard when, what they hand in per second, and what they are waiting for."""

from collections import deque

import msgspec

WINDOW_S = 60.0


class Peer(msgspec.Struct):
    """One process. `bins` holds (second, trajectories, tokens) of the last minute."""

    first: float
    seen: float
    bins: deque[list[int]] = msgspec.field(default_factory=deque)
    waits: dict[str, tuple[str, float]] = {}  # reason and since when, by request

    def count(self, tokens: int, now: float) -> None:
        """It handed in a trajectory with so many ACTION tokens."""
        if not self.bins or self.bins[-1][0] != int(now):
            self.bins.append([int(now), 0, 0])
        self.bins[-1][1] += 1
        self.bins[-1][2] += tokens

    def rates(self, now: float) -> tuple[float, float]:
        """Trajectories and tokens per second over the last minute, or since it was first heard."""
        while self.bins and self.bins[0][0] < now - WINDOW_S:
            self.bins.popleft()
        window = min(WINDOW_S, max(1.0, now - self.first))
        return (
            sum(bin[1] for bin in self.bins) / window,
            sum(bin[2] for bin in self.bins) / window,
        )


class Activity:
    """Everybody who has spoken to the buffer; `learner` is who last asked for a take."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}
        self.actors: set[str] = set()
        self.learner: str | None = None

    def seen(self, name: str, now: float) -> Peer:
        peer = self.peers.setdefault(name, Peer(now, now))
        peer.seen = now
        return peer

    def waits(self, name: str, request: str, reason: str, now: float) -> None:
        """`name` was told to wait; its waiting time goes on if it was waiting already."""
        waits = self.peers[name].waits
        waits[request] = (reason, waits.get(request, (reason, now))[1])

    def served(self, name: str, request: str) -> None:
        self.peers[name].waits.pop(request, None)

    def alive(self, now: float, within_s: float) -> int:
        """Actors heard within so many seconds."""
        return sum(now - self.peers[name].seen <= within_s for name in self.actors)

    def learner_waits(self, now: float) -> str:
        """The learner and since when it has been silent, in words."""
        if self.learner is None:
            return "the learner, not heard yet"
        return f"{self.learner}, last heard {now - self.peers[self.learner].seen:.1f} s ago"
