"""Who was heard when, what they hand in per second, and what they are waiting for."""

from collections import deque

import msgspec

from evolver_async.schema import WeightId

WINDOW_S = 60.0


class Peer(msgspec.Struct):
    """One process. `bins` holds (second, trajectories, tokens) of the last minute.

    `generated`: tokens that processes of this name sampled while this buffer listened; `reported`:
    what the present one said last, None before its first word. `left`: it has said that it leaves.
    `doing`: what held up its slowest ticket, and when it said so. `behind_since`: since when
    its `weights` have been too old and the same.
    """

    first: float
    seen: float
    bins: deque[list[int]] = msgspec.field(default_factory=deque)
    waits: dict[str, tuple[str, float]] = {}  # reason and since when, by request
    generated: int = 0
    reported: int | None = None
    left: bool = False
    doing: tuple[str, float] | None = None
    weights: WeightId | None = None
    behind_since: float | None = None
    counters: dict[str, float] = {}  # what it last told to count, by metric name

    def count(self, tokens: int, now: float) -> None:
        """It handed in a trajectory with so many ACTION tokens."""
        if not self.bins or self.bins[-1][0] != int(now):
            self.bins.append([int(now), 0, 0])
        self.bins[-1][1] += 1
        self.bins[-1][2] += tokens

    def greet(self) -> None:
        """It begins: all that it will have sampled is new, and it waits for nothing yet."""
        self.waits, self.doing, self.behind_since = {}, None, None
        if self.reported is None:
            self.reported = 0

    def report(self, generated: int) -> None:
        """It has sampled so many tokens since its start; fewer than before means it began anew.

        Of a process that was there before this buffer only what comes from now on counts.
        """
        before = generated if self.reported is None else self.reported
        self.generated += generated - before if generated >= before else generated
        self.reported = generated

    def hold(self, weights: WeightId | None, behind: bool, now: float) -> None:
        """It has these weights; `behind`: it should have newer ones."""
        if not behind:
            self.behind_since = None
        elif self.behind_since is None or weights != self.weights:
            self.behind_since = now
        self.weights = weights

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
    """Who has spoken to the buffer, which began to listen at `began`.

    `learner` is who last asked for a take.
    """

    def __init__(self, began: float = 0.0) -> None:
        self.began = began
        self.peers: dict[str, Peer] = {}
        self.actors: set[str] = set()
        self.learner: str | None = None

    def seen(self, name: str, now: float) -> Peer:
        peer = self.peers.setdefault(name, Peer(now, now))
        peer.seen = now
        return peer

    def forget(self, now: float) -> None:
        """Forgets who has been silent for a minute and has no part in the run: visitors, mostly."""
        for name, peer in list(self.peers.items()):
            counts = peer.counters or peer.reported is not None
            if now - peer.seen > WINDOW_S and not (
                counts or name in self.actors or name == self.learner
            ):
                del self.peers[name]

    def waits(self, name: str, request: str, reason: str, now: float) -> None:
        """`name` was told to wait; its waiting time goes on if it was waiting already."""
        waits = self.peers[name].waits
        waits[request] = (reason, waits.get(request, (reason, now))[1])

    def served(self, name: str, request: str) -> None:
        self.peers[name].waits.pop(request, None)

    def works(self, name: str) -> Peer:
        """The actor of this name, which is here to work."""
        self.actors.add(name)
        peer = self.peers[name]
        peer.left = False
        return peer

    def leaves(self, name: str) -> None:
        """The actor asks for nothing any more."""
        peer = self.peers[name]
        peer.left = True
        peer.behind_since = None
        self.served(name, "lease")

    def alive(self, now: float, within_s: float) -> int:
        """Actors heard within so many seconds that have not said that they leave."""
        return sum(self._here(name, now, within_s) for name in self.actors)

    def asking(self, now: float, within_s: float) -> set[str]:
        """Those of them that wait for tickets."""
        return {
            name
            for name in self.actors
            if self._here(name, now, within_s) and "lease" in self.peers[name].waits
        }

    def _here(self, name: str, now: float, within_s: float) -> bool:
        peer = self.peers[name]
        return not peer.left and now - peer.seen <= within_s

    def generated(self) -> int:
        """Tokens that all actors have sampled, as far as they have said."""
        return sum(peer.generated for peer in self.peers.values())

    def counters(self) -> dict[str, float]:
        """What everybody counts, added up by name."""
        sums: dict[str, float] = {}
        for peer in self.peers.values():
            for name, value in peer.counters.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def learner_waits(self, now: float) -> str:
        """The learner and since when it has been silent, in words."""
        if self.learner is None:
            return "the learner, not heard yet"
        return f"{self.learner}, last heard {now - self.peers[self.learner].seen:.1f} s ago"
