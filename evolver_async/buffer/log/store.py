"""State and journal together: every record is appended and applied; a start replays the records.

Trajectories of live groups stay in memory; others are read from the journal on demand.
"""

import logging
from collections.abc import Callable

from evolver_async.buffer.log.disk import DiskFull
from evolver_async.buffer.log.journal import Journal
from evolver_async.buffer.log.quarantine import JournalError
from evolver_async.buffer.state import records
from evolver_async.buffer.state.censoring import Censoring, GroupChange
from evolver_async.buffer.state.groups import ZERO_SPREAD, GroupState, HeldGroup, ending
from evolver_async.buffer.state.leases import Leases
from evolver_async.buffer.state.machine import BufferState
from evolver_async.errors import Inconsistency
from evolver_async.schema import Trajectory, WeightId
from evolver_async.wire.trajectory_bytes import Parcel, finish, unwrap

NO_BODY = Parcel(b"", 0)
# of records that no buffer of this program has written
READ_ERRORS = ValueError, KeyError, IndexError, RecursionError, Inconsistency

log = logging.getLogger(__name__)


class BufferStore:
    """State, journal and leases of one buffer. Opens the journal and replays it.

    Leases begin anew at `now`, with the actors that missing members were granted to last.
    """

    def __init__(self, state: BufferState, journal: Journal, leases: Leases, now: float) -> None:
        self.state = state
        self.replay = state.replay
        self.journal = journal
        self.leases = leases
        self.bodies: dict[int, dict[int, Trajectory]] = {}
        self.censoring = Censoring()
        self.now = now  # the time of the next record
        self.spare = True  # segments may have become dispensable since the last commit
        self._swept: WeightId | None = None  # the head for which groups that are too old were ended
        for head, location in journal.replay():
            try:
                state.apply(records.decode(head), location)
            except READ_ERRORS as error:
                raise JournalError(f"{journal.where(location)}: {error}") from error
        if not journal.sizes:
            journal.roll(records.encode(state.snapshot()))
        journal.check_sealed(self._needed())
        try:
            state.check()
        except Inconsistency as error:
            raise JournalError(f"{journal.end()}: the ledger does not close: {error}") from error
        for held in self.replay.by_state["open"].values():
            self._lease_again(held, now)

    def record(self, record: records.AnyRecord, trajectory: Trajectory | None = None) -> None:
        """Append to the journal and apply; durable after the next `commit`."""
        body = NO_BODY if trajectory is None else finish(trajectory)
        location = self.journal.append(records.encode(record), *body)
        before = self._concerned(record)
        self.state.apply(record, location)
        if before:
            self._note_changes(before, record)
        if trajectory is not None:
            group = self.bodies.setdefault(trajectory.group_id, {})
            group[trajectory.member] = trajectory

    def commit(self) -> None:
        """Write all records so far to disk; then begin and drop segments as needed.

        Raises DiskFull: nothing was written, and it can be tried again.
        """
        self.journal.commit()
        if self.journal.full_segment:
            try:
                self.journal.roll(records.encode(self.state.snapshot()))
            except DiskFull as refusal:
                log.warning("%s; no new segment for now", refusal)
            self.spare = True
        if self.spare:
            try:
                # Moving a segment into the archive can need room. Old segments only occupy space,
                # so a lack of it must not end the buffer here, nor at every start after it.
                self.journal.drop(self._needed())
            except DiskFull as refusal:
                log.warning("%s; old segments stay for now", refusal)
            self.spare = False

    def write(self) -> Callable[[], None] | None:
        """Write all records so far; return the call that makes them durable, None if they are.

        See `Journal.write`. Segments begin and go in a whole commit only: both need every record
        before them on disk.
        """
        if self.spare or self.journal.full_segment:
            self.commit()
            return None
        return self.journal.write()

    def evict(self, groups: list[int], reason: str) -> None:
        """End these groups for `reason`."""
        if groups:
            self.record(records.Evicted(groups=groups, reason=reason))
        for group_id in groups:
            self.forget(group_id)

    def forget(self, group_id: int) -> None:
        """Drop the leases and the cached trajectories of a group."""
        self.leases.close(group_id)
        self.bodies.pop(group_id, None)

    def sweep(self, cause: str = "") -> None:
        """Evict groups that are too old: open ones for their age, ready ones as stale.

        A `cause` that is not the tasks' replaces both reasons. Groups that dynamic sampling leaves
        out are evicted as well: the record of it may have been lost.
        """
        replay = self.replay
        opened, ready = replay.by_state["open"], replay.by_state["ready"]
        if cause or replay.at.head != self._swept:  # none grows too old while the head stands
            for groups, reason in ((opened, cause or "age"), (ready, cause or "stale")):
                self.evict([g for g, held in groups.items() if replay.too_old(held)], reason)
            self._swept = replay.at.head
        if any(stage.refills for stage in replay.stages):
            self.evict([g for g, held in ready.items() if replay.lacks_spread(held)], ZERO_SPREAD)

    def forget_gone(self) -> None:
        """Forget the groups that are held no more."""
        known = {*self.bodies, *self.leases.vacant, *(lease.group_id for lease in self.leases)}
        for group_id in known - self.replay.at.groups.keys():
            self.forget(group_id)

    def trajectories(self, held: HeldGroup) -> list[Trajectory]:
        """The members of a group in order, from memory or from the journal."""
        bodies = self.bodies.get(held.group_id, {})
        return [
            bodies[member]
            if member in bodies
            else unwrap(Parcel(self.journal.read(facts.location), facts.location[-1]))
            for member, facts in sorted(held.arrived.items(), key=lambda item: item[0])
        ]

    def _concerned(self, record: records.AnyRecord) -> dict[int, tuple[HeldGroup, GroupState]]:
        """The groups that a record may end or bring back, each with its state before it."""
        at = self.replay.at
        match record:
            case records.Evicted():
                groups = record.groups
            case records.Reported():
                groups = at.takes[record.take].groups
            case records.LineageStarted():
                groups = [group_id for taken in at.takes.values() for group_id in taken.groups]
            case _:
                return {}
        return {group_id: (at.groups[group_id], at.groups[group_id].state) for group_id in groups}

    def _note_changes(
        self, before: dict[int, tuple[HeldGroup, GroupState]], record: records.AnyRecord
    ) -> None:
        """Tell the censoring report of groups that ended or are held again."""
        evicted_for = record.reason if isinstance(record, records.Evicted) else ""
        for held, state in before.values():
            if held.kind != "rollout" or (state == "closed") == (held.state == "closed"):
                continue
            fate, reason = None, ""
            if held.state == "closed":
                fate, reason = ending(held, evicted_for)
            leases = self.leases.of_group(held.group_id)
            change = GroupChange(
                group_id=held.group_id,
                env=held.task.env,
                fate=fate,
                reason=reason,
                missing=len(held.missing),
                leased_s=[self.now - lease.since for lease in leases for _ in lease.members],
            )
            self.censoring.follow(change)

    def _lease_again(self, held: HeldGroup, now: float) -> None:
        tickets: dict[tuple[str, int], list[int]] = {}
        for member in held.missing:
            owner = held.owners[member]
            tickets.setdefault((owner.actor, owner.attempt), []).append(member)
        for (actor, attempt), members in tickets.items():
            self.leases.grant(actor, held.group_id, attempt, members, now)

    def _needed(self) -> int:
        """The segment with the oldest trajectory of a group that is held or may come back."""
        return min(
            (segment for held in self.replay.at.groups.values() for segment in held.segments),
            default=self.journal.newest,
        )
