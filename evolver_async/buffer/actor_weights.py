"""Weights that actors have and may play with, from their own reports.

An actor gets no ticket that demands weights which it has not held. Two kinds of weights it only has
to be able to fetch: those of an evaluation, and those that a stage began with where it has a lag.
So it never waits for a publish with a ticket in hand.
"""

from dataclasses import dataclass

from evolver_async.buffer.log.store import BufferStore
from evolver_async.buffer.monitor.peers import Activity
from evolver_async.buffer.state.groups import HeldGroup
from evolver_async.schema import SCRIPTED, Kind, WeightId
from evolver_async.wire.messages import Lease, Renew


@dataclass
class ActorWeights:
    """Weights of actors as they report them, and the oldest that their tickets may demand."""

    store: BufferStore
    activity: Activity

    def note(self, peer: str, request: Lease | Renew, now: float) -> None:
        """Note an actor's request, its seconds and its weights. Evaluations pin older ones."""
        actor = self.activity.activate(peer)
        actor.see(request.weights, request.visible)
        # A parked LEASE repeats older weights than a RENEW after it.
        weights = actor.held if isinstance(request, Lease) else request.weights
        self.activity.store_seconds(peer, request.seconds)
        oldest = self.store.replay.oldest_allowed()
        behind = oldest is not None and (weights is None or weights < oldest)
        if behind:
            groups = self.store.replay.at.groups
            held = self.store.leases.of_peer(peer)
            behind = all(groups[lease.group_id].pinned is None for lease in held)
        actor.hold(weights, behind, now)

    def demanded(self, peer: str, kind: Kind) -> WeightId | None:
        """The oldest weights with which this actor may play groups of `kind` now."""
        if kind in SCRIPTED:
            return None
        return self.store.replay.demanded(self.held(peer))

    def held(self, peer: str) -> WeightId | None:
        """The newest weights that this actor has held, or could hold at once.

        With a lag it holds back those that the stage began with until there are newer ones, which
        are not made before it plays: a ticket tells it to load them.
        """
        held, replay = self.activity.peers[peer].held, self.store.replay
        head = replay.at.head
        if held is None or head is None or head.lineage != held.lineage:
            return held
        began = WeightId(lineage=head.lineage, step=min(replay.at.floor, head.step))
        loads = replay.numbers.weight_lag > 0 and self.seen_by(peer, began)
        return max(held, began) if loads else held

    def allow(self, peer: str, held: HeldGroup, weights: WeightId | None) -> bool:
        """True if this actor may play members of the group again, with `weights` or newer ones.

        They must not make the group older than its grant did.
        """
        if held.pinned is not None:
            return self.seen_by(peer, held.pinned)
        if held.kind in SCRIPTED:
            return True
        return weights is not None and all(weights >= one for one in held.demanded)

    def seen_by(self, peer: str, weights: WeightId) -> bool:
        """True if the actor can fetch these weights: a channel shows them in their order."""
        visible = self.activity.peers[peer].visible
        return visible is not None and visible >= weights
