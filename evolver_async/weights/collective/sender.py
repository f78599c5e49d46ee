"""The learner's side of a broadcast, and the protocol; `receiver` is the other side.

The learner writes a log of events into a store (see `event_log`), and every receiver reads it: so
all call the same collectives in one order:

    roll   R            every receiver answers; unfinished casts are given up
    epoch  E, members   these build a new group; a receiver that was asked but left out joins anew
    cast   I, version   the members receive its buckets into memory of their own
    sums   I, checksums they compare, commit the version whole or not at all, and acknowledge
    end                 the learner leaves

An epoch begins after a join or a failed cast, with a cast of every version that is kept: so late
and failed receivers catch up. No end waits longer than `deadline_s` for a peer that makes no
progress, and a roll call lasts ROLL_S: a silent receiver is left out. So is one, for PAUSE_S, with
which not even a group of two can be built: groups connect all members with each other, and one
whose ports are filtered would keep the versions from all.
"""

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from evolver_async.schema import WeightId
from evolver_async.weights.channel.layout import aligned
from evolver_async.weights.channel.snapshot import WeightSnapshot
from evolver_async.weights.collective.event_log import EventLog, ServedStore
from evolver_async.weights.collective.process_group import (
    IN_FLIGHT,
    LOOK_S,
    Broadcast,
    BroadcastGroup,
    CastFailed,
    buckets,
    checksum,
    first_line,
    gpu_id,
    on_distinct_gpus,
)

ROLL_S = 3.0  # of the 5 s that a lost actor may cost beside the deadline
ATTEMPTS = 4  # epochs for one version, before it is left to a later attempt
PAUSE_S = 60.0  # before members that lack the newest version are tried again

log = logging.getLogger(__name__)


@dataclass
class BroadcastSender:
    """Sender of versions: keeps the group of receivers and casts versions to it."""

    served: ServedStore
    deadline_s: float
    bucket_bytes: int
    device: str
    closing: Callable[[], bool]

    def __post_init__(self) -> None:
        self._log = EventLog(self.served.store)
        self.bucket_bytes = aligned(self.bucket_bytes)
        self._members: dict[int, dict[str, str]] = {}
        self._numbers = 0  # the highest number that a receiver took
        self._newcomers: set[int] = set()
        self._unreachable: dict[int, dict[str, str]] = {}
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

    def send(self, held: dict[WeightId, WeightSnapshot], head: WeightId) -> None:
        """Cast `head` to every member, and all versions of `held` to newcomers."""
        if self.due():
            self._again_at = math.inf
            self._abandon_group()
            again, self._unreachable = self._unreachable, {}
            self._members |= again
            if again:  # a group with them would fail, which NCCL sees late
                self._leave_out_unreachable(again)
        for _ in range(ATTEMPTS):
            if self.closing():
                return
            try:
                if self._group is not None and not self.newcomers():
                    self._cast(head, held, head)
                elif self._begin_epoch():
                    for weights in held:
                        self._cast(weights, held, head)
                return
            except CastFailed as failure:
                log.warning("weights %s did not reach every actor: %s", head, failure)
                apart = self._group is None or not self._group.connected
                self._abandon_group()
                if apart:
                    self._leave_out_unreachable(self._members)
        again = f"they are tried again in {PAUSE_S:g} s"
        log.error("weights %s are given up after %d attempts; %s", head, ATTEMPTS, again)
        self._again_at = time.monotonic() + PAUSE_S

    def close(self) -> None:
        self._abandon_group()
        self._log.write({"kind": "end"})
        self.served.close()

    def _abandon_group(self) -> None:
        if self._group is not None:
            self._group.abandon()
            self._group = None

    def _begin_epoch(self) -> bool:
        """Build a group of all receivers that answer; False if there are none."""
        self._abandon_group()
        self.served.forget("epoch", "here", "ack")
        asked = self._asked()
        self._members = self._roll_call(asked)
        devices = [member["device"] for member in self._members.values()]
        nccl = on_distinct_gpus([gpu_id(self.device), *devices])
        if names := ", ".join(one["name"] for one in self._members.values()):
            log.info("weights go to %s", names)
        try:
            self._group = self._build(list(self._members), list(asked), nccl)
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

    def _leave_out_unreachable(self, tried: dict[int, dict[str, str]]) -> None:
        """Leave out those members for a while with which not even a group of two can be built.

        Silent ones stay members: the next epoch asks them again, or to join anew.
        """
        if len(self._members) < 2:
            return
        here = self._roll_call(tried)  # they have left the group that failed
        for number, member in here.items():
            if self.closing():
                return
            try:
                group = self._build([number], [], nccl=False)
            except RuntimeError as error:
                self._unreachable[number] = self._members.pop(number)
                self._again_at = time.monotonic() + PAUSE_S
                log.warning(
                    "%s cannot be reached at its data ports: it gets no weights, and is tried again"
                    " in %g s: %s",
                    *(member["name"], PAUSE_S, first_line(error)),
                )
            else:
                assert group is not None
                group.abandon()

    def _asked(self) -> dict[int, dict[str, str]]:
        """Members and newcomers."""
        asked = dict(self._members)
        for number in self.newcomers():
            asked[number] = json.loads(self.served.store.get(f"member/{number}"))
            self.served.store.delete_key(f"member/{number}")
            self._newcomers.discard(number)
        return asked

    def _roll_call(self, asked: dict[int, dict[str, str]]) -> dict[int, dict[str, str]]:
        """Return the receivers that answer in time."""
        self._rolls += 1
        self._log.write({"kind": "roll", "number": self._rolls})
        here: set[int] = set()
        until = time.monotonic() + ROLL_S
        while len(here) < len(asked) and time.monotonic() < until and not self.closing():
            time.sleep(0.002)
            for number in asked.keys() - here:
                if self.served.store.check([f"here/{self._rolls}/{number}"]):
                    here.add(number)
        for number in here:
            self.served.store.delete_key(f"here/{self._rolls}/{number}")
        for number in asked.keys() - here:
            name = asked[number]["name"]
            log.warning("%s is silent: it gets no weights until it joins again", name)
        return {number: member for number, member in asked.items() if number in here}

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
        sums = self._broadcast(snapshot.bytes_N)
        self._log.write({"kind": "sums", "number": number, "checksums": sums})
        self._await_acknowledgements(number)

    def _broadcast(self, bytes_N: Tensor) -> list[int]:
        """Send the bytes; return their checksums, computed while they travel."""
        assert self._group is not None
        found: list[int] = []
        under_way: list[Broadcast] = []
        try:
            for bucket_N in buckets(bytes_N, self.bucket_bytes):
                under_way.append(self._group.broadcast(bucket_N))
                found.append(checksum(bucket_N))
                if len(under_way) == IN_FLIGHT:
                    self._finish(under_way.pop(0))
            for part in under_way:
                self._finish(part)
            self._group.connected = True
        except RuntimeError as error:
            raise CastFailed(first_line(error)) from None
        return found

    def _finish(self, part: Broadcast) -> None:
        until = time.monotonic() + self.deadline_s
        while not part.done(LOOK_S):
            if time.monotonic() > until:
                raise CastFailed(f"no progress in {self.deadline_s:g} s")
            if self.closing():
                raise CastFailed("the learner leaves")

    def _await_acknowledgements(self, number: int) -> None:
        missing, until = set(self._members), time.monotonic() + self.deadline_s
        while missing:
            for member in list(missing):
                name = f"ack/{number}/{member}"
                if not self.served.store.check([name]):
                    continue
                if self.served.store.get(name) != b"ok":
                    raise CastFailed(f"{self._members[member]['name']} received other bytes")
                self.served.store.delete_key(name)
                missing.remove(member)
            if missing and time.monotonic() > until:
                silent = ", ".join(self._members[member]["name"] for member in missing)
                raise CastFailed(f"{silent} did not confirm it in {self.deadline_s:g} s")
            if missing and self.closing():
                raise CastFailed("the learner leaves")
            time.sleep(0.001 if missing else 0)


def _plain(weights: WeightId) -> list[int]:
    return [weights.lineage, weights.step]
