"""Leases of actors on members of groups.

Pure and not durable: after a restart every lease starts anew. A lease ends when its members have
arrived, when they are given back, or when it is not renewed in time; its remaining members are
vacant then, and are granted again under a new attempt.
"""

import math
from collections.abc import Iterator

import msgspec

# During a standstill nobody is answered, so no actor can renew. If all of that time counted, a slow
# sync would have every episode of every actor played again. Some of it counts, so that the leases
# of a dead actor end even where every sync is slow.
COUNTED_S = 1.0  # the most that counts between two calls of `expire`; the rest is a standstill
COUNTED_SHARE = 0.2  # of a lease, if that is less
LOGGED_S = 3.0  # a shorter standstill is not: a slow disk has dozens of them a minute


class MemberLease(msgspec.Struct):
    """Lease of one ticket by one actor. Times in seconds on the caller's clock.

    `doing`, `doing_since`: the reported activity of its slowest member.
    """

    peer: str
    group_id: int
    attempt: int
    members: set[int]
    since: float
    deadline: float
    progress: int = -1
    progress_at: float = 0.0
    doing: str = ""
    doing_since: float = math.inf

    @property
    def still_since(self) -> float:
        """The time of the last progress of the ticket or of its slowest member, the earlier one."""
        return min(self.progress_at, self.doing_since)


class Leases:
    """All leases and all vacant members.

    A lease lasts `lease_s`; it is renewed, by RENEW or a heartbeat that shows work, only if its
    progress counter has moved within `stall_s`, or a finished member was turned away because the
    disk is full.
    `playing`: leased members.
    """

    def __init__(self, lease_s: float, stall_s: float) -> None:
        self.lease_s = lease_s
        self.stall_s = stall_s
        self.vacant: dict[int, set[int]] = {}
        self.playing = 0
        self._counted_s = min(COUNTED_S, COUNTED_SHARE * lease_s)
        self._expired_at = math.inf  # the last call of `expire`
        self._by_group: dict[int, list[MemberLease]] = {}
        self._by_peer: dict[str, set[int]] = {}  # groups in which a peer holds a lease
        # Groups whose members a peer has all sent. Its ACK may still wait for the disk.
        self._delivered: dict[str, set[int]] = {}
        self.expired: list[tuple[int, float]] = []  # group and age of members, by the last `expire`

    def grant(self, peer: str, group_id: int, attempt: int, members: list[int], now: float) -> None:
        """Lease these members; they are vacant no longer."""
        self._expired_at = min(self._expired_at, now)
        left = self.vacant.get(group_id, set()) - set(members)
        self.vacant.pop(group_id, None)
        if left:
            self.vacant[group_id] = left
        self._delivered.get(peer, set()).discard(group_id)
        lease = MemberLease(
            peer=peer,
            group_id=group_id,
            attempt=attempt,
            members=set(members),
            since=now,
            deadline=now + self.lease_s,
            progress_at=now,
        )
        self._by_group.setdefault(group_id, []).append(lease)
        self._by_peer.setdefault(peer, set()).add(group_id)
        self.playing += len(lease.members)

    def finish(self, group_id: int, member: int, peer: str) -> None:
        """End the lease of a member that arrived from `peer`, which need not be its holder."""
        over, own = False, False
        for lease in self.of_group(group_id):
            if member in lease.members:
                lease.members.remove(member)
                self.playing -= 1
                over = over or not lease.members
                own = own or lease.peer == peer
        if over:
            self._forget_empty(group_id)
            if own and self.held(peer, group_id) is None:
                self._delivered.setdefault(peer, set()).add(group_id)
        if group_id in self.vacant:
            self.vacant[group_id].discard(member)
            if not self.vacant[group_id]:
                del self.vacant[group_id]

    def close(self, group_id: int) -> None:
        """End all leases of the group."""
        for lease in self.of_group(group_id):
            self.playing -= len(lease.members)
            lease.members.clear()
        self._forget_empty(group_id)
        self.vacant.pop(group_id, None)

    def renew(self, peer: str, progress: dict[int, int], now: float) -> list[int]:
        """Extend the leases of `peer`; return the groups in which it holds none.

        A group is not lost once `peer` has sent all its members. An empty `progress` reports new
        weights, and not that the actor holds no ticket.
        """
        lost, delivered = [], self._delivered.pop(peer, set())
        # A RENEW without tickets only tells of new weights. Forgetting here would fence an actor
        # whose last members still wait for the disk.
        if progress:
            delivered &= progress.keys()
        if delivered:
            self._delivered[peer] = delivered
        for group_id, count in progress.items():
            lease = self.held(peer, group_id)
            if lease is None:
                if group_id not in delivered:
                    lost.append(group_id)
                continue
            if count != lease.progress:
                lease.progress, lease.progress_at = count, now
            if now - self._stood_still_s(now) - lease.progress_at >= self.stall_s:
                self._vacate(lease)
                lost.append(group_id)
            else:
                lease.deadline = now + self.lease_s
        return lost

    def work(self, peer: str, now: float) -> None:
        """Extend the leases of a process whose heartbeats show work: a forward holds its RENEW up.

        A ticket without progress for `stall_s` is left to its deadline.
        """
        for lease in self.of_peer(peer):
            if now - lease.progress_at < self.stall_s:
                lease.deadline = max(lease.deadline, now + self.lease_s)

    def note(self, peer: str, doing: dict[int, str], still_s: dict[int, float], now: float) -> None:
        """Note the activity of the slowest members of these groups, and its duration."""
        for group_id, words in doing.items():
            lease = self.held(peer, group_id)
            if lease is not None:
                lease.doing, lease.doing_since = words, now - still_s.get(group_id, 0.0)

    def note_arrival(self, peer: str, group_id: int, now: float) -> None:
        """Count an arrival that could not be stored yet as progress of its ticket."""
        lease = self.held(peer, group_id)
        if lease is not None:
            lease.progress_at, lease.deadline = now, now + self.lease_s

    def release(self, peer: str, group_id: int, members: list[int]) -> list[int]:
        """Make members vacant that the actor gives back; return those that it held."""
        lease = self.held(peer, group_id)
        given = sorted(lease.members & set(members)) if lease else []
        if given:
            self._remove(group_id, set(given), peer)
            self.vacant.setdefault(group_id, set()).update(given)
        return given

    def expire(self, now: float) -> list[str]:
        """Vacate the leases that ran out; return a line for the log about each.

        A standstill of this process or its disk ends no lease, as no actor could renew. A part of
        it counts, so leases end even where standstills follow each other.
        """
        lost = self._extend(self._stood_still_s(now), now)
        self._expired_at = now
        over = [lease for lease in self if lease.deadline <= now]
        lost += [
            f"group {lease.group_id}: {lease.peer} was silent"
            f"{f' ({lease.doing})' if lease.doing else ''}, "
            f"members {sorted(lease.members)} will be granted again"
            for lease in over
        ]
        self.expired = [(one.group_id, now - one.since) for one in over for _ in one.members]
        for lease in over:
            self._vacate(lease)
        return lost

    def abandon(self, peer: str) -> None:
        """Vacate all leases of `peer`: the process is gone, or a new one has its name."""
        self._delivered.pop(peer, None)
        for lease in self.of_peer(peer):
            self._vacate(lease)

    def keep(self, peer: str, groups: set[int]) -> None:
        """Vacate the leases of `peer` on other groups."""
        for lease in self.of_peer(peer):
            if lease.group_id not in groups:
                self._vacate(lease)

    def held(self, peer: str, group_id: int) -> MemberLease | None:
        return next((one for one in self.of_group(group_id) if one.peer == peer), None)

    def of_group(self, group_id: int) -> list[MemberLease]:
        return self._by_group.get(group_id, [])

    def of_peer(self, peer: str) -> list[MemberLease]:
        """Return the leases of one actor."""
        groups = self._by_peer.get(peer, set())
        return [one for group in groups for one in self.of_group(group) if one.peer == peer]

    def __iter__(self) -> Iterator[MemberLease]:
        for leases in self._by_group.values():
            yield from leases

    def _stood_still_s(self, now: float) -> float:
        """Return the seconds since the last call of `expire` that do not count."""
        return max(0.0, now - self._expired_at - self._counted_s)

    def _extend(self, still_s: float, now: float) -> list[str]:
        """Extend all leases by a standstill; return a line for the log about a long one."""
        if not still_s or not self._by_group:
            return []
        for lease in self:
            lease.deadline = min(lease.deadline + still_s, now + self.lease_s)
            lease.progress_at = min(lease.progress_at + still_s, now)
        seconds = still_s + self._counted_s
        if seconds < LOGGED_S:
            return []
        return [f"the buffer or its disk stood still for {seconds:.1f} s; no lease ends by it"]

    def _vacate(self, lease: MemberLease) -> None:
        members = set(lease.members)
        self._remove(lease.group_id, members, lease.peer)
        self.vacant.setdefault(lease.group_id, set()).update(members)

    def _remove(self, group_id: int, members: set[int], peer: str) -> None:
        for lease in self.of_group(group_id):
            if lease.peer == peer:
                self.playing -= len(lease.members & members)
                lease.members -= members
        self._forget_empty(group_id)

    def _forget_empty(self, group_id: int) -> None:
        leases = self.of_group(group_id)
        left = [lease for lease in leases if lease.members]
        if left:
            self._by_group[group_id] = left
        else:
            self._by_group.pop(group_id, None)
        for peer in {lease.peer for lease in leases} - {lease.peer for lease in left}:
            self._by_peer[peer].discard(group_id)
            if not self._by_peer[peer]:
                del self._by_peer[peer]
