"""Bundles: members that finish together travel in one message.

PUSHes that are sent in the same turn of the asyncio loop become one PUSHES of at most `BUNDLE`
members and `BUNDLE_BYTES`. Each keeps its number and gets a reply of its own, and is sent again
alone or with others. So a bundle changes what a message costs, not what is delivered.

A message is checked as a whole. A bundle that is refused is split, so that one faulty member harms
no other.
"""

from collections.abc import Iterator

from evolver_async.wire.envelope import Envelope, pack_pushes
from evolver_async.wire.router import BUNDLE
from evolver_async.wire.trajectory_bytes import Parcel

# The fixed cost of a message is half of that of a small member, and nothing beside a large one.
BUNDLE_BYTES = 1 << 20


class Bundles:
    """PUSHes that wait for the end of this turn, and the bundles that are under way."""

    def __init__(self) -> None:
        self._waiting: dict[int, Parcel] = {}
        self._alone: set[int] = set()  # their bundle was refused
        self._sent: dict[int, list[int]] = {}  # the numbers in each bundle, by its own
        self._bundle_of: dict[int, int] = {}  # the bundle that a number was sent in last

    def add(self, number: int, parcel: Parcel) -> bool:
        """Add a PUSH of this number; True if it is the first of this turn."""
        self._waiting[number] = parcel
        return len(self._waiting) == 1

    def empty(self, sender: Envelope, numbers: Iterator[int]) -> Iterator[list[bytes]]:
        """Yield the messages that hold all waiting PUSHes; `numbers` gives the bundles theirs."""
        bundle: dict[int, Parcel] = {}
        size = 0
        waiting, self._waiting = self._waiting, {}
        for number, parcel in waiting.items():
            length = len(parcel.data)
            if number in self._alone:
                yield self._message(sender, numbers, {number: parcel})
                continue
            if bundle and (len(bundle) == BUNDLE or size + length > BUNDLE_BYTES):
                yield self._message(sender, numbers, bundle)
                bundle, size = {}, 0
            bundle[number] = parcel
            size += length
        if bundle:
            yield self._message(sender, numbers, bundle)

    def members(self, number: int) -> list[int]:
        """The requests in the message of this number: its own if it is no bundle."""
        return self._sent.get(number, [number])

    def split(self, number: int) -> list[int]:
        """End a bundle that was refused; return its members, which are sent alone from now on."""
        members = self._sent.get(number, [])
        self._alone.update(members)
        for member in members:
            self._leave(member)
        return members

    def drop(self, number: int) -> None:
        """Forget a request that is over."""
        self._waiting.pop(number, None)
        self._alone.discard(number)
        self._leave(number)

    def _message(
        self, sender: Envelope, numbers: Iterator[int], bundle: dict[int, Parcel]
    ) -> list[bytes]:
        for member in bundle:
            self._leave(member)
        if len(bundle) == 1:
            return pack_pushes(sender, next(iter(bundle)), bundle)
        number = next(numbers)
        self._sent[number] = list(bundle)
        self._bundle_of |= dict.fromkeys(bundle, number)
        return pack_pushes(sender, number, bundle)

    def _leave(self, member: int) -> None:
        number = self._bundle_of.pop(member, None)
        if number is not None:
            self._sent[number] = [other for other in self._sent[number] if other != member]
            if not self._sent[number]:
                del self._sent[number]
