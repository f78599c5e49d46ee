"""A receiver's side of a broadcast: it follows the learner's event log (see `sender`)."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor
from torch._C._distributed_c10d import Store

from evolver_async.schema import WeightId
from evolver_async.weights.collective.event_log import OK, REQUESTS, EventReader
from evolver_async.weights.collective.presence import Member, Presence, unreachable
from evolver_async.weights.collective.process_group import (
    IN_FLIGHT,
    LOOK_S,
    Broadcast,
    BroadcastGroup,
    CastFailed,
    buckets,
    first_line,
    gpu_id,
    passing,
    sweep,
)
from evolver_async.weights.collective.versions import ReceivedVersion, ReceivedVersions

log = logging.getLogger(__name__)


@dataclass
class BroadcastReceiver:
    """Connection of a receiver to one learner."""

    versions: ReceivedVersions
    store: Store
    host: str
    name: str
    deadline_s: float
    device: str
    closing: Callable[[], bool]

    def __post_init__(self) -> None:
        self._presence = Presence(self.host, self.closing)
        self._about = Member(self.name, gpu_id(self.device), self.host, self._presence.port)
        self._reader = EventReader(self.store)
        self._group: BroadcastGroup | None = None
        self._lacking = ""  # why there is no group, though it is a member
        self._number = 0
        self._join()

    def run(self) -> None:
        """Follow the events until the learner leaves or the receiver closes.

        Raises RuntimeError if the learner is gone.
        """
        while not self.closing():
            event = self._reader.wait(2 * LOOK_S)
            sweep()
            for weights in self.versions.requests():
                self.store.queue_push(REQUESTS, msgspec.json.encode(weights).decode())
            if event is None:
                continue
            kind = event["kind"]
            if kind == "end":
                return
            if kind == "roll":
                self._answer(event)
            elif kind == "epoch" and self._number in event["members"]:
                self._enter(event)
            elif kind == "epoch" and self._number in event["asked"]:
                self._join()
            elif kind == "cast" and self._group is not None:
                self._receive_version(event)
            elif kind == "cast" and self._lacking:
                self._acknowledge(event, self._lacking)

    def leave(self) -> None:
        """End the presence, then the group: the learner that sees the one end knows why."""
        self._presence.close()
        self._leave_group()

    def _leave_group(self) -> None:
        """Abandon the group with its unfinished broadcasts."""
        self._lacking = ""
        if self._group is not None:
            self._group.abandon()
            self._group = None

    def _join(self) -> None:
        self._leave_group()
        self._number = self.store.add("numbers", 1)
        self.store.set(f"member/{self._number}", msgspec.json.encode(self._about).decode())

    def _answer(self, roll: dict[str, Any]) -> None:
        """Answer a roll call with the numbers of the others that cannot be reached."""
        self._leave_group()
        addresses = {
            int(number): (host, port) for number, (host, port) in roll["addresses"].items()
        }
        found = []
        if addresses.pop(self._number, None):
            found = unreachable(addresses)
        answer = msgspec.json.encode(found).decode()
        self.store.set(f"here/{roll['number']}/{self._number}", answer)

    def _acknowledge(self, cast: dict[str, Any], answer: str) -> None:
        """Confirm a cast with OK, or tell why it was not received."""
        self.store.set(f"ack/{cast['number']}/{self._number}", answer)

    def _enter(self, event: dict[str, Any]) -> None:
        members = event["members"]
        try:
            self._group = BroadcastGroup(
                self.store,
                event["number"],
                1 + members.index(self._number),
                1 + len(members),
                host=self.host,
                device=self.device if event["nccl"] else "",
                deadline_s=self.deadline_s,
            )
        except RuntimeError as error:
            log.warning("a group of receivers could not be built: %s", first_line(error))
            self._lacking = f"could not enter the group: {first_line(error)}"

    def _receive_version(self, cast: dict[str, Any]) -> None:
        """Receive, verify, commit and acknowledge one version; a failure leaves all as it was.

        Bytes that are not lacking pass by: they are sent for other members.
        """
        weights, kept = _weights(cast["weights"]), [_weights(other) for other in cast["held"]]
        size, bucket_bytes = cast["bytes"], cast["bucket_bytes"]
        received = None
        if self.versions.lacks(weights, kept):
            received = ReceivedVersion(self.versions.buffer(size), cast["tensors"])
        try:
            found = self._receive(
                buckets(received.bytes_N, bucket_bytes) if received else passing(size, bucket_bytes)
            )
        except (CastFailed, RuntimeError) as error:
            log.warning("a version of the weights was not received: %s", first_line(error))
            self._leave_group()
            self._acknowledge(cast, f"did not receive it: {first_line(error)}")
            return
        sums = self._sums()
        if sums is None or sums["number"] != cast["number"]:
            return  # given up by the learner; its next event is in the log
        if found != sums["checksums"]:
            log.error("weights %s do not match their checksums", weights)
            self._acknowledge(cast, "received other bytes")
            return
        self.versions.commit(weights, received, kept, _weights(cast["head"]))
        self._acknowledge(cast, OK)

    def _receive(self, parts: list[Tensor]) -> list[int]:
        """Fill the buckets in their order; return their checksums."""
        sums: list[int] = []
        under_way: list[Broadcast] = []

        def finish() -> None:
            part = under_way.pop(0)
            self._finish(part)
            sums.append(part.checksum())

        assert self._group is not None
        for bucket_N in parts:
            under_way.append(self._group.broadcast(bucket_N))
            if len(under_way) == IN_FLIGHT:
                finish()
        while under_way:
            finish()
        return sums

    def _finish(self, part: Broadcast) -> None:
        until = time.monotonic() + self.deadline_s
        while not part.done(LOOK_S):
            event = self._reader.peek()
            if event is not None and event["kind"] != "sums":
                raise CastFailed("given up by the learner")
            if time.monotonic() > until or self.closing():
                raise CastFailed("no progress")

    def _sums(self) -> dict[str, Any] | None:
        """Return the event after a cast, None if the learner has given it up."""
        until = time.monotonic() + self.deadline_s
        while (event := self._reader.peek(LOOK_S)) is None:
            if time.monotonic() > until or self.closing():
                return None
        return self._reader.wait(LOOK_S) if event["kind"] == "sums" else None


def _weights(plain: list[int]) -> WeightId:
    lineage, step = plain
    return WeightId(lineage=lineage, step=step)
