"""Stalls: processes without progress, their reasons and durations, for STATUS, log and metrics.

Pure: time is an argument. Members, actors, weights and the learner are examined; a process that is
not listed makes progress, waits for one that is, or is paused.
"""

import math
from collections.abc import Iterable

import msgspec

from evolver_async.buffer.monitor.peers import GONE_S, PAUSE, Activity
from evolver_async.buffer.state.leases import Leases
from evolver_async.buffer.state.replay import Replay

REPEAT_S = 60.0
STANDSTILL_S = 3.0  # between two calls of `lines`, past which nobody could be heard meanwhile
WAITS = {"sample": "waits for fresh data: "}
PARKED_S = 6.0  # a parked LEASE may speak of weights that its sender has replaced since


class Stall(msgspec.Struct, frozen=True):
    """A process, `who`, without progress for `for_s` seconds.

    `about` (group, weights, take or life) distinguishes several stalls of one process.
    """

    who: str
    about: str
    what: str
    for_s: float

    @property
    def text(self) -> str:
        return f"{self.who} has made no progress for {self.for_s:.0f} s: {self.what}"


def find(
    replay: Replay, leases: Leases, activity: Activity, now: float, warn_s: float
) -> list[Stall]:
    """List the stalls that last longer than `warn_s`, the longest first."""
    found = [
        *_actors(leases, activity, now, warn_s),
        *_learner(replay, activity, now, warn_s),
    ]
    late = [stall for stall in found if stall.for_s > warn_s]
    return sorted(late, key=lambda stall: -stall.for_s)


def _actors(leases: Leases, activity: Activity, now: float, warn_s: float) -> Iterable[Stall]:
    silent = set()
    groups: dict[str, list[str]] = {}
    for lease in leases:
        groups.setdefault(lease.peer, []).append(f"group {lease.group_id}")
    for name in sorted(activity.actors):
        peer = activity.peers[name]
        if not peer.left and warn_s < now - peer.seen < GONE_S:
            silent.add(name)
            held = groups.get(name, [])
            what = f"not heard; holds {', '.join(held) or 'no group any more'}"
            if peer.joining:
                what = "has joined and asked for no ticket yet: it loads its model, or hangs"
            if peer.doing is not None:
                what += f"; {now - peer.doing[1]:.0f} s ago {peer.doing[0]}"
            yield Stall(name, "life", what, now - peer.seen)
        elif peer.behind_since is not None and now - peer.behind_since > PARKED_S:
            what = f"holds weights {peer.weights}, which are too old, and newer ones do not come"
            yield Stall(name, "weights", what, now - peer.behind_since)
    for lease in leases:
        if lease.peer not in silent:
            what = f"group {lease.group_id} waits for members {sorted(lease.members)}"
            if lease.doing:
                what = f"{what}: {lease.doing}"
            yield Stall(lease.peer, f"group {lease.group_id}", what, now - lease.still_since)


def _learner(replay: Replay, activity: Activity, now: float, warn_s: float) -> Iterable[Stall]:
    at, name = replay.at, activity.learner or "learner"
    seen, waits = activity.began, {}
    if activity.learner is not None:
        seen, waits = activity.peers[name].seen, activity.peers[name].waits
    if now - seen <= warn_s:
        for about, (reason, since) in waits.items():
            if about == PAUSE:  # it is intended
                continue
            yield Stall(name, about, f"{WAITS.get(about, '')}{reason}", now - since)
        return
    taken = at.takes.get(at.next_take - 1)
    if taken is not None and not taken.reported:
        what = f"take {at.next_take - 1} is out and nothing is heard: stopped, or stuck in a step"
    elif activity.learner is None:
        what = "has not been heard yet"
    else:
        what = "neither asks for a take nor reports one: stopped, or writing a checkpoint"
    yield Stall(name, "life", what, now - seen)


class Stalls:
    """Stalls of one buffer over time: lines for the log, counts for the metrics."""

    def __init__(self, replay: Replay, leases: Leases, activity: Activity, warn_s: float) -> None:
        self._of = (replay, leases, activity)
        self._warn_s = warn_s
        self._logged: dict[tuple[str, str], tuple[Stall, float]] = {}
        self._begun: list[Stall] = []  # since the last `drain`
        self._longest: dict[tuple[str, str], float] = {}  # since the last `counters`
        self._sought_at, self._any = -math.inf, False  # by the last `find`
        self._asked_at, self._skipped = math.inf, False  # the last call of `lines`

    def find(self, now: float) -> list[Stall]:
        """The stalls of this moment."""
        found = find(*self._of, now, self._warn_s)
        self._sought_at, self._any = now, bool(found)
        for stall in found:
            place = (stall.who, stall.about)
            self._longest[place] = max(stall.for_s, self._longest.get(place, 0.0))
        return found

    def lines(self, now: float) -> list[str]:
        """Lines for the log: a stall when it is found, then once a minute, and its end.

        None after a standstill of this process: what waits for it has to be read first. Of several
        in a row, as of a slow disk, every second one is passed over.
        """
        stood_still, self._asked_at = now - self._asked_at > STANDSTILL_S, now
        self._skipped = stood_still and not self._skipped
        if self._skipped:
            return []
        found = {(stall.who, stall.about): stall for stall in self.find(now)}
        lines = []
        for place, stall in found.items():
            if place not in self._logged:
                self._begun.append(stall)
            _, logged_at = self._logged.get(place, (stall, now - REPEAT_S))
            if now - logged_at >= REPEAT_S:
                lines.append(stall.text)
                logged_at = now
            self._logged[place] = (stall, logged_at)
        still = {stall.who for stall in found.values()}
        for place in self._logged.keys() - found.keys():
            stall, _ = self._logged.pop(place)
            if stall.who not in still:  # else it has only got worse
                lines.append(f"{stall.who} goes on after {stall.for_s:.0f} s: {stall.what}")
        return lines

    def drain(self) -> list[Stall]:
        """Return the stalls that `lines` has found first since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def counters(self, now: float) -> dict[str, float]:
        """Count the stalls since the last call; give the longest of them in seconds.

        If there were none, they are not sought again for a tenth of what makes one.
        """
        if self._any or now - self._sought_at >= self._warn_s / 10:
            self.find(now)
        longest, self._longest = self._longest, {}
        return {
            "supervision/stalled": float(len(longest)),
            "supervision/longest_s": max(longest.values(), default=0.0),
        }
