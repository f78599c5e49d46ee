"""Stalls: processes without progress, their reasons and durations, for STATUS, log and metrics.

Pure: time is an argument. Actors, weights and the learner are examined; a process that is not
listed makes progress, waits for one that does or that is listed, or is paused. A process whose
heartbeats come is stuck only if its count stands still and it uses no processor: one slow member of
a group is none while its actor plays others.
"""

import math
from collections.abc import Iterable

import msgspec

from evolver_async.buffer.monitor.peers import GONE_S, PAUSE, START_S, Activity
from evolver_async.buffer.state.leases import Leases, MemberLease
from evolver_async.buffer.state.replay import Replay

REPEAT_S = 60.0  # until a stall is logged again, doubled each time
REPEAT_LIMIT_S = 960.0
ALERT_STEPS = 3  # a process may wait for so many of the run's longest steps without an alert
ALERT_PAUSE_S = 3600.0  # between two alerts of one process
LIFE = "life"  # of what a silent or stuck process has none
STANDSTILL_S = 3.0  # between two calls of `lines`; in a longer one no request was received
WAITS = {"sample": "waits for fresh data: "}
PARKED_S = 6.0  # a parked LEASE may speak of weights that its sender has replaced since


class Stall(msgspec.Struct, frozen=True):
    """A process, `who`, without progress for `for_s` seconds.

    `about` (groups, weights, take or life) distinguishes several stalls of one process. `silent`:
    no message came from it, so it has ended, is stopped, or cannot be reached.
    """

    who: str
    about: str
    what: str
    for_s: float
    silent: bool = False

    @property
    def text(self) -> str:
        return stall_text(self.who, self.what, self.for_s, self.silent)


class BusyProcess(msgspec.Struct, frozen=True):
    """A process, `who`, whose count has stood still for `for_s` seconds while it computes."""

    who: str
    phase: str
    for_s: float

    @property
    def text(self) -> str:
        return f"{self.who} is busy for {self.for_s:.0f} s in {self.phase or 'one piece of work'}"


def stall_text(who: str, what: str, for_s: float, silent: bool) -> str:
    """Return the sentence about a stall."""
    if silent:
        return f"{who} was not heard for {for_s:.0f} s (stopped?): {what}"
    return f"{who} has made no progress for {for_s:.0f} s: {what}"


def find(
    replay: Replay, leases: Leases, activity: Activity, now: float, warn_s: float
) -> tuple[list[Stall], list[BusyProcess]]:
    """List the stalls that last longer than `warn_s`, the longest first, and the busy processes."""
    stalls: list[Stall] = []
    busy: list[BusyProcess] = []
    for one in (
        *_actors(leases, activity, now, warn_s),
        *_learner(replay, leases, activity, now, warn_s),
    ):
        if one.for_s > warn_s:
            stalls.append(one) if isinstance(one, Stall) else busy.append(one)
    return sorted(stalls, key=lambda stall: -stall.for_s), busy


def _actors(
    leases: Leases, activity: Activity, now: float, warn_s: float
) -> Iterable[Stall | BusyProcess]:
    held: dict[str, list[MemberLease]] = {}
    for lease in leases:
        held.setdefault(lease.peer, []).append(lease)
    for name in sorted(activity.actors | held.keys()):
        peer, own = activity.peers.get(name), held.get(name, [])
        if peer is None or peer.left or now - peer.seen >= GONE_S:
            if own:  # nothing but its tickets tells of it
                yield _waiting(name, own, now, max(lease.progress_at for lease in own))
            continue
        if now - peer.seen <= warn_s and peer.behind_since is None and not own:
            continue
        condition, for_s = peer.condition(now, warn_s)
        groups = ", ".join(f"group {lease.group_id}" for lease in own) or "no group any more"
        if condition in ("heard", "moving"):
            moved_at = max([peer.moved_at, *(lease.progress_at for lease in own)])
            if own and now - moved_at > warn_s:
                if now - peer.busy_at <= warn_s:
                    yield BusyProcess(name, peer.phase, now - moved_at)
                else:
                    yield _waiting(name, own, now, max(moved_at, peer.busy_at))
            elif peer.behind_since is not None and (
                now - peer.behind_since > PARKED_S and now - max(moved_at, peer.busy_at) > warn_s
            ):
                what = f"holds weights {peer.weights}, which are too old, and newer ones do not"
                yield Stall(name, "weights", f"{what} come", now - peer.behind_since)
        elif condition == "busy":
            yield BusyProcess(name, peer.phase, for_s)
        elif condition == "stuck":
            what = f"stuck in {peer.phase}: its count stands still, and it uses no processor"
            yield Stall(name, LIFE, f"{what}; it holds {groups}", for_s)
        elif condition == "silent":
            what = f"holds {groups}"
            if peer.joining:
                loads = peer.phase or "load of the model"
                what = f"has joined and asked for no ticket yet: {loads}, or it hangs"
            if peer.doing is not None:
                what += f"; {now - peer.doing[1]:.0f} s ago {peer.doing[0]}"
            yield Stall(name, LIFE, what, for_s, silent=True)


def _waiting(name: str, held: list[MemberLease], now: float, moved_at: float) -> Stall:
    """Return the stall of an actor none of whose tickets goes on, with the slowest one."""
    slowest = min(held, key=lambda lease: lease.still_since)
    what = f"group {slowest.group_id} waits for members {sorted(slowest.members)}"
    if slowest.doing:
        what = f"{what}: {slowest.doing}"
    if len(held) > 1:
        what = f"{what}; and {len(held) - 1} more groups"
    return Stall(name, "groups", what, now - moved_at)


def _learner(
    replay: Replay, leases: Leases, activity: Activity, now: float, warn_s: float
) -> Iterable[Stall | BusyProcess]:
    at, name = replay.at, activity.learner or "learner"
    if activity.learner is None:
        if now - activity.began > max(warn_s, START_S):
            yield Stall(name, LIFE, "it has not started yet", now - activity.began, silent=True)
        return
    peer = activity.peers[name]
    condition, for_s = peer.condition(now, warn_s)
    if condition == "heard":
        for about, (reason, since) in peer.waits.items():
            if about == PAUSE or now - since <= warn_s:  # a pause is intended
                continue
            # It waits for actors: while one of them works, that is no stall, of neither.
            worked_at = max((lease.progress_at for lease in leases), default=-math.inf)
            worked_at = max(worked_at, activity.worked_at())
            still_s = min(now - since, now - worked_at)
            yield Stall(name, about, f"{WAITS.get(about, '')}{reason}", still_s)
        return
    taken = at.takes.get(at.next_take - 1)
    out = f"take {at.next_take - 1} is out"
    if taken is None or taken.reported:
        out = "it neither asks for a take nor reports one"
    if condition == "busy":
        yield BusyProcess(name, peer.phase, for_s)
    elif condition == "stuck":
        what = f"stuck in {peer.phase}: its count stands still, and it uses no processor; {out}"
        yield Stall(name, LIFE, what, for_s)
    elif condition == "silent":
        if peer.phase:
            out += f"; last heard in {peer.phase}"
        yield Stall(name, LIFE, out, for_s, silent=True)


class Stalls:
    """Stalls of one buffer over time: lines for the log, counts for the metrics."""

    def __init__(self, replay: Replay, leases: Leases, activity: Activity, warn_s: float) -> None:
        self._of = (replay, leases, activity)
        self._warn_s = warn_s
        # by stall: the last one like it, when to log it again, and the pause after that
        self._logged: dict[tuple[str, str], tuple[Stall, float, float]] = {}
        self.busy: list[BusyProcess] = []  # of the last `find`
        self._busy: dict[tuple[str, str], None] = {}  # said to be so
        self._alerted: dict[str, float] = {}  # time of the last alert, by process
        self._longest: dict[tuple[str, str], float] = {}  # since the last `counters`
        self._sought_at, self._any = -math.inf, False  # by the last `find`
        self._asked_at, self._skipped = math.inf, False  # the last call of `lines`

    def find(self, now: float) -> list[Stall]:
        """The stalls of this moment."""
        found, self.busy = find(*self._of, now, self._warn_s)
        self._sought_at, self._any = now, bool(found)
        for stall in found:
            place = (stall.who, stall.about)
            self._longest[place] = max(stall.for_s, self._longest.get(place, 0.0))
        return found

    def lines(self, now: float) -> list[str]:
        """Lines for the log: a stall when it is found, then after growing pauses, and its end.

        A busy process gets one line for each phase.

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
            _, due, pause_s = self._logged.get(place, (stall, now, REPEAT_S))
            if now >= due:
                lines.append(stall.text)
                due, pause_s = now + pause_s, min(2 * pause_s, REPEAT_LIMIT_S)
            self._logged[place] = (stall, due, pause_s)
        busy = {(one.who, one.phase): one.text for one in self.busy}
        lines += [text for place, text in busy.items() if place not in self._busy]
        self._busy = dict.fromkeys(busy)
        still = {stall.who for stall in found.values()}
        for place in self._logged.keys() - found.keys():
            stall, *_ = self._logged.pop(place)
            if stall.who not in still:  # else it has only got worse
                lines.append(f"{stall.who} goes on after {stall.for_s:.0f} s: {stall.what}")
        return lines

    def alert(self, now: float, step_s: float) -> tuple[str, str] | None:
        """Return title and text of the alert that what `lines` has found calls for, if any.

        All that is found at once has one cause, and one alert: of a process that is not heard or
        stuck at once, of one that waits after ALERT_STEPS of the run's longest step, `step_s`. A
        process has no further one for ALERT_PAUSE_S.
        """
        found = [
            stall
            for stall, *_ in self._logged.values()
            if stall.about == LIFE or stall.for_s > ALERT_STEPS * step_s
        ]
        fresh = [
            one for one in found if now - self._alerted.get(one.who, -math.inf) > ALERT_PAUSE_S
        ]
        if not fresh:
            return None
        first = min(fresh, key=lambda stall: (stall.about != LIFE, -stall.for_s))
        others = {stall.who for stall in fresh} - {first.who}
        self._alerted |= dict.fromkeys((first.who, *others), now)
        more = f"; and {len(others)} more processes" if others else ""
        return f"stall of {first.who}", f"{first.text}{more}"

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
