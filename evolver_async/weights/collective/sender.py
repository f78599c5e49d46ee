"""The learner's side of a broadcast, and the protocol; `receiver` is the other side.

The learner writes a log of events into a store (see `event_log`), and every receiver reads it: so
all call the same collectives in one order:

    roll   R, addresses every receiver answers which ones it cannot reach; open casts are given up
    epoch  E, members   these build a new group; a receiver that was asked but left out joins anew
    cast   I, version   the members receive its buckets into memory of their own, or let them pass
    sums   I, checksums they compare, commit the version whole or not at all, and acknowledge
    end                 the learner leaves

An epoch begins after a join, a leave, a death or a failed cast, with a cast of every version that
is kept: so late and failed receivers catch up. A receiver can ask for a version that is kept, which
is then cast again. No end waits longer than `deadline_s` for a peer that makes no progress, and a
roll call lasts ROLL_S: a silent receiver is left out. A connection to each receiver tells at once
that it has ended (see `presence`), and nothing waits for it any more.

Groups connect all members with each other, and one whose ports are filtered would keep the versions
from all. So a receiver is left out for PAUSE_S if the learner cannot connect to it, if it and
another one cannot reach each other, if not even a group of two can be built with it, or if two
failed casts in a row name it.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from evolver_async.schema import WeightId
from evolver_async.weights.channel.byte_layout import aligned
from evolver_async.weights.channel.snapshot import WeightSnapshot
from evolver_async.weights.collective.event_log import OK, REQUESTS, EventLog, ServedStore
from evolver_async.weights.collective.presence import Connections, Member, apart
from evolver_async.weights.collective.process_group import (
    IN_FLIGHT,
    LOOK_S,
    Broadcast,
    BroadcastGroup,
    CastFailed,
    buckets,
    first_line,
    gpu_id,
    on_distinct_gpus,
)

ROLL_S = 3.0  # of the 5 s that a lost actor may cost beside the deadline
ATTEMPTS = 4  # epochs for one version, before it is left to a later attempt
PAUSE_S = 60.0  # before members that lack the newest version are tried again

REFUSED = "ECONNREFUSED"  # by a host whose process has ended

log = logging.getLogger(__name__)


@dataclass
class BroadcastSender:
    """Sender of versions: keeps the group of receivers and casts versions to it."""

    served: ServedStore
    deadline_s: float
    bucket_bytes: int
    device: str
    closing: Callable[[], bool]
    warn: Callable[[str], object] = lambda _: None  # of members that are left out

    def __post_init__(self) -> None:
        self._log = EventLog(self.served.store)
        self.bucket_bytes = aligned(self.bucket_bytes)
        self._members: dict[int, Member] = {}
        self._connections = Connections()
        self._numbers = 0  # the highest number that a receiver took
        self._newcomers: set[int] = set()
        self._left_out: dict[int, Member] = {}
        self._warned: set[str] = set()  # warnings so far about members that are left out
        self._refused: set[str] = set()  # names of those that refused, as one that has ended does
        self._dropped: list[int] = []  # numbers that join anew if they are read in an epoch
        self._suspects: list[str] = []  # names of those that the last failure names
        self._again_at = math.inf  # the time at which members that lack a version are tried again
        self._rolls = self._epochs = 0
        self.casts = 0
        self._group: BroadcastGroup | None = None

    def newcomers(self) -> list[int]:
        """List the receivers that have joined and hold no version yet."""
        highest = self.served.store.add("numbers", 0)
        self._newcomers |= set(range(self._numbers + 1, highest + 1))
        self._numbers = highest
        return [
            number for number in self._newcomers if self.served.store.check([f"member/{number}"])
        ]

    def due(self) -> bool:
        """True if it is time to try members again that lack the newest version."""
        return time.monotonic() >= self._again_at

    def requested(self) -> set[WeightId]:
        """Return the versions that receivers have asked for since the last call."""
        store, found = self.served.store, set[WeightId]()
        while store.queue_len(REQUESTS):
            found.add(msgspec.json.decode(store.queue_pop(REQUESTS), type=WeightId))
        return found

    def send(
        self, held: dict[WeightId, WeightSnapshot], head: WeightId, due: list[WeightId]
    ) -> None:
        """Cast the versions of `due` to every member, and all of `held` to newcomers."""
        if self.due():
            self._again_at = math.inf
            self._take_back()
        for _ in range(ATTEMPTS):
            if self.closing():
                return
            try:
                same = not (self._drop_gone() or self.newcomers())
                if self._group is not None and same:
                    for weights in due:
                        self._cast(weights, held, head)
                elif self._begin_epoch():
                    for weights in held:
                        self._cast(weights, held, head)
                self._suspects = []
                return
            except CastFailed as failure:
                log.warning("weights %s did not reach every actor: %s", head, failure)
                # NCCL connects with the first broadcast only, so a group that was built but has
                # sent nothing may have failed for a filtered port.
                unconnected = self._group is None or not self._group.connected
                self._abandon_group()
                self._drop_gone()
                if unconnected:
                    self._leave_out_unreachable(self._members)
                self._suspect(failure)
        again = f"they are tried again in {PAUSE_S:g} s"
        log.error("weights %s are given up after %d attempts; %s", head, ATTEMPTS, again)
        self._again_at = time.monotonic() + PAUSE_S

    def close(self) -> None:
        self._abandon_group()
        self._connections.close()
        self._log.write({"kind": "end"})
        self.served.close()

    def _abandon_group(self) -> None:
        if self._group is not None:
            self._group.abandon()
            self._group = None

    def _begin_epoch(self) -> bool:
        """Build a group of all receivers that answer; False if there are none."""
        self._abandon_group()
        # The store keeps its keys in memory as long as the learner lives. An epoch leaves one
        # address for each pair of members, and there is one a minute while an actor cannot be
        # reached.
        self.served.forget("epoch", "here", "ack")
        self._join_newcomers()
        asked = [*self._members, *self._dropped]
        self._drop_silent(self._connections.silent(self._members, since=0.0))
        lacking = self._roll_call(self._members)
        self._drop_gone()
        lacking = {one: others for one, others in lacking.items() if one in self._members}
        self._drop_silent([number for number in self._members if number not in lacking])
        for number in apart(lacking):
            others = {one for one in lacking if number in lacking[one]} | {*lacking[number]}
            names = ", ".join(self._members[one].name for one in others if one in self._members)
            self._leave_out(number, f"cannot reach {names}, or is not reached from there")
        devices = [member.device for member in self._members.values()]
        nccl = on_distinct_gpus([gpu_id(self.device), *devices])
        if names := ", ".join(one.name for one in self._members.values()):
            log.info("weights go to %s", names)
        # The next group has the other order, so other members pass on the bytes of a bad one.
        numbers = [*self._members][:: 1 if self._epochs % 2 else -1]
        anew = [one for one in asked if one not in self._left_out]  # those are taken back later
        self._dropped = []
        try:
            self._group = self._build(numbers, anew, nccl)
        except RuntimeError as error:
            raise CastFailed(f"the group could not be built: {first_line(error)}") from None
        return self._group is not None

    def _build(self, numbers: list[int], asked: list[int], nccl: bool) -> BroadcastGroup | None:
        """Build a group of these receivers, None without any. Raises RuntimeError."""
        self._epochs += 1
        epoch = {"number": self._epochs, "members": numbers, "asked": asked, "nccl": nccl}
        self._log.write({"kind": "epoch"} | epoch)
        if not numbers:
            return None
        return BroadcastGroup(
            self.served.store,
            self._epochs,
            0,
            1 + len(numbers),
            host=self.served.host,
            device=self.device if nccl else "",
            deadline_s=self.deadline_s,
        )

    def _leave_out_unreachable(self, tried: dict[int, Member]) -> None:
        """Leave out those members for a while with which not even a group of two can be built.

        Silent ones stay members: the next epoch asks them again, or to join anew.
        """
        if len(self._members) < 2:
            return
        here = self._roll_call(tried)  # they have left the group that failed
        for number in here:
            if self.closing():
                return
            try:
                group = self._build([number], [], nccl=False)
            except RuntimeError as error:
                why = f"cannot be reached at its data ports ({first_line(error)})"
                self._leave_out(number, why)
            else:
                assert group is not None
                group.abandon()

    def _suspect(self, failure: CastFailed) -> None:
        """Leave out the first member that this failure names and the one before it named, too."""
        names = {self._members[one].name: one for one in failure.members if one in self._members}
        if twice := [name for name in names if name in self._suspects]:
            self._leave_out(names.pop(twice[0]), f"failed twice: {failure}")
        self._suspects = list(names)

    def _leave_out(self, number: int, why: str, quiet: bool = False) -> None:
        """Send a member no weights for PAUSE_S, and warn of it once unless `quiet`."""
        self._again_at = time.monotonic() + PAUSE_S
        member = self._left_out[number] = self._members.pop(number)
        text = f"{member.name} {why}: it gets no weights, and is tried again in {PAUSE_S:g} s"
        log.warning("%s", text)
        if not quiet and text not in self._warned:
            self._warned.add(text)
            self.warn(text)

    def _take_back(self) -> None:
        """Make members again of those that were left out and can be reached."""
        again, self._left_out = self._left_out, {}
        self._connections.drop(again)
        failed = self._connections.add(again)
        self._dropped += [one for one, why in failed.items() if why == REFUSED]  # they have ended
        back = {number: one for number, one in again.items() if number not in failed}
        self._left_out = {one: again[one] for one, why in failed.items() if why != REFUSED}
        if self._left_out:
            self._again_at = time.monotonic() + PAUSE_S
        if back or not again:
            self._abandon_group()
            self._members |= back
        if back:  # a group with them can fail, which NCCL sees late
            self._leave_out_unreachable(back)

    def _join_newcomers(self) -> None:
        """Make members of those that have joined and can be reached."""
        joined = {}
        for number in self.newcomers():
            about = self.served.store.get(f"member/{number}")
            joined[number] = msgspec.json.decode(about, type=Member)
            self.served.store.delete_key(f"member/{number}")
            self._newcomers.discard(number)
        self._members |= joined
        for number, why in self._connections.add(joined).items():
            ended = why == REFUSED and joined[number].name not in self._refused
            if why == REFUSED:
                self._refused.add(joined[number].name)
            self._leave_out(number, f"cannot be reached at its data ports ({why})", quiet=ended)

    def _drop_gone(self) -> bool:
        """Drop the members that have left or ended; True if there are any."""
        gone = self._connections.gone(self._members)
        for number in gone:
            log.info("%s has left the weights", self._members[number].name)
        self._drop(gone)
        return bool(gone)

    def _drop_silent(self, numbers: list[int]) -> None:
        for number in numbers:
            name = self._members[number].name
            log.warning("%s is silent: it gets no weights until it joins again", name)
        self._drop(numbers)

    def _drop(self, numbers: list[int]) -> None:
        """Forget members; they join anew if they read it."""
        self._connections.drop(numbers)
        self._dropped += numbers
        for number in numbers:
            del self._members[number]

    def _roll_call(self, asked: dict[int, Member]) -> dict[int, list[int]]:
        """Return the receivers that answer in time, each with those that it cannot reach.

        Nothing waits for one that ends meanwhile.
        """
        self._rolls += 1
        addresses = {str(number): (one.host, one.port) for number, one in asked.items()}
        self._log.write({"kind": "roll", "number": self._rolls, "addresses": addresses})
        here: dict[int, list[int]] = {}
        until = time.monotonic() + ROLL_S
        while time.monotonic() < until and not self.closing():
            awaited = asked.keys() - here.keys()
            if not awaited - {*self._connections.gone(awaited)}:
                break
            time.sleep(0.002)
            for number in awaited:
                answer = f"here/{self._rolls}/{number}"
                if self.served.store.check([answer]):
                    here[number] = msgspec.json.decode(self.served.store.get(answer))
                    self.served.store.delete_key(answer)
        return here

    def _cast(
        self, weights: WeightId, held: dict[WeightId, WeightSnapshot], head: WeightId
    ) -> None:
        """Send one version to the group. Raises CastFailed if a member did not accept it."""
        snapshot = held[weights]
        number, self.casts = self.casts, self.casts + 1
        self._log.write(
            {
                "kind": "cast",
                "number": number,
                "weights": _plain(weights),
                "head": _plain(head),
                "held": [_plain(other) for other in held],
                "tensors": snapshot.tensors,
                "bytes": len(snapshot.bytes_N),
                "bucket_bytes": self.bucket_bytes,
            }
        )
        cast = CastState(number, {*self._members}, time.monotonic())
        sums = self._broadcast(snapshot, cast)
        self._log.write({"kind": "sums", "number": number, "checksums": sums})
        self._await_acknowledgements(cast)

    def _broadcast(self, snapshot: WeightSnapshot, cast: "CastState") -> list[int]:
        """Send the bytes as they are copied; return their checksums, computed while they travel."""
        assert self._group is not None
        found: list[int] = []
        under_way: list[Broadcast] = []
        try:
            for index, bucket_N in enumerate(buckets(snapshot.bytes_N, self.bucket_bytes)):
                snapshot.await_bytes(index * self.bucket_bytes + len(bucket_N))
                under_way.append(self._group.broadcast(bucket_N))
                found.append(under_way[-1].checksum())
                if len(under_way) == IN_FLIGHT:
                    self._finish(under_way.pop(0), cast)
            for part in under_way:
                self._finish(part, cast)
            self._group.connected = True
        except RuntimeError as error:
            raise CastFailed(first_line(error)) from None
        return found

    def _finish(self, part: Broadcast, cast: "CastState") -> None:
        until = time.monotonic() + self.deadline_s
        while not part.done(LOOK_S):
            self._look(cast)
            if time.monotonic() > until:
                raise CastFailed(f"no progress in {self.deadline_s:g} s", cast.missing)

    def _await_acknowledgements(self, cast: "CastState") -> None:
        until = time.monotonic() + self.deadline_s
        while True:
            self._look(cast)
            if not cast.missing:
                return
            if time.monotonic() > until:
                late = f"did not confirm it in {self.deadline_s:g} s"
                raise CastFailed(f"{self._names(cast.missing)} {late}", cast.missing)
            time.sleep(0.001)

    def _look(self, cast: "CastState") -> None:
        """Take in the answers to a cast. Raises CastFailed if a member cannot receive it."""
        for member in list(cast.missing):
            name = f"ack/{cast.number}/{member}"
            if not self.served.store.check([name]):
                continue
            if (answer := self.served.store.get(name).decode()) != OK:
                raise CastFailed(f"{self._names([member])} {answer}", [member])
            self.served.store.delete_key(name)
            cast.missing.remove(member)
        if gone := self._connections.gone(cast.missing):
            raise CastFailed(f"{self._names(gone)} left or ended")
        if silent := self._connections.silent(cast.missing, cast.began):
            raise CastFailed(f"{self._names(silent)} is silent", silent)
        if cast.missing and self.closing():
            raise CastFailed("the learner leaves")

    def _names(self, numbers: Iterable[int]) -> str:
        return ", ".join(self._members[number].name for number in sorted(numbers))


@dataclass
class CastState:
    """A cast under way: the members that have not confirmed it."""

    number: int
    missing: set[int]
    began: float


def _plain(weights: WeightId) -> list[int]:
    return [weights.lineage, weights.step]
