"""Ledger: received = held + trained + filtered + evicted, for every kind of group.

Counted in groups, trajectories and ACTION tokens. A group is received when it is granted, a
trajectory when it is accepted. Held amounts are counted by their holder, so `check` compares two
independent counts. No decisions are made here.
"""

import msgspec

from evolver_async.errors import Inconsistency
from evolver_async.schema import SCRIPTED

HELD = ("open", "ready", "taken")
CLOSED = ("trained", "filtered", "evicted")
REFUSED = ("rejected", "duplicate", "stale")


class Amount(msgspec.Struct):
    """Amount in groups, trajectories and ACTION tokens."""

    groups: int = 0
    trajectories: int = 0
    tokens: int = 0

    def add(self, other: "Amount", sign: int = 1) -> None:
        self.groups += sign * other.groups
        self.trajectories += sign * other.trajectories
        self.tokens += sign * other.tokens


HeldAmounts = dict[str, dict[str, Amount]]  # by kind, then by open, ready or taken


class Ledger(msgspec.Struct):
    """Running totals: received by kind; closed by kind, fate and reason; refused by reason.

    `turns`: those of the received trajectories by kind, which no fate divides.
    """

    received: dict[str, Amount] = {}
    turns: dict[str, int] = {}
    closed: dict[str, dict[str, dict[str, Amount]]] = {}
    refused: dict[str, Amount] = msgspec.field(
        default_factory=lambda: {fate: Amount() for fate in REFUSED}
    )

    def receive(self, kind: str, amount: Amount) -> None:
        self.received.setdefault(kind, Amount()).add(amount)

    def arrive(self, kind: str, tokens: int, turns: int) -> None:
        """Count a received trajectory."""
        received = self.received[kind]  # as its group was
        received.trajectories += 1
        received.tokens += tokens
        self.turns[kind] = self.turns.get(kind, 0) + turns

    def close(self, kind: str, fate: str, reason: str, amount: Amount) -> None:
        """Count the end of a group: trained, filtered(reason) or evicted(reason)."""
        self._entry(kind, fate, reason).add(amount)

    def reopen(self, kind: str, fate: str, reason: str, amount: Amount) -> None:
        """Undo the end of a group: the learner went back to before it."""
        self._entry(kind, fate, reason).add(amount, -1)

    def refuse(self, fate: str, amount: Amount) -> None:
        self.refused[fate].add(amount)

    def total(self, kind: str, fate: str) -> Amount:
        """Sum the amounts that ended with `fate`, over all reasons."""
        total = Amount()
        for amount in self.closed.get(kind, {}).get(fate, {}).values():
            total.add(amount)
        return total

    def sampled_tokens(self) -> int:
        """Count the received ACTION tokens that a policy sampled; others are scripted."""
        return sum(amount.tokens for kind, amount in self.received.items() if kind not in SCRIPTED)

    def check(self, held: HeldAmounts) -> None:
        """Raise Inconsistency with the kind and both counts if the ledger does not close."""
        for kind in sorted(self.received.keys() | self.closed.keys() | held.keys()):
            counted = Amount()
            for amount in held.get(kind, {}).values():
                counted.add(amount)
            for fate in CLOSED:
                counted.add(self.total(kind, fate))
            received = self.received.get(kind, Amount())
            if counted != received:
                raise Inconsistency(f"ledger of {kind}: received {received}, found {counted}")

    def _entry(self, kind: str, fate: str, reason: str) -> Amount:
        fates = self.closed.setdefault(kind, {}).setdefault(fate, {})
        return fates.setdefault(reason, Amount())
