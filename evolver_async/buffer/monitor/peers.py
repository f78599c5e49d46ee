"""Per-process activity: last contact, throughput, reason for waiting."""

import math
import sys
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Literal

import msgspec

from evolver_async.metrics.activity import ACTOR, GENERATIONS, HOST_CPU_SHARE, RUN_CPU_SHARE, TOTALS
from evolver_async.schema import WeightId
from evolver_async.wire.messages import Beat

WINDOW_S = 60.0
GONE_S = 3600.0  # an actor may leave by disappearing; after this it is not missed any more
# A process that starts imports its libraries, and an import can hold its heartbeat, too: it is not
# missed sooner, however small `buffer.warn_s` is.
START_S = 30.0
PEERS = 4096  # past it the process that was silent for longest is forgotten
METRICS = 256  # names that are counted; later ones are left out
NAME_CHARS = 100  # of a metric
REASON_CHARS = 500
ENGINE_LEVELS = ("engine/waiting", "engine/kv_use")  # counters that are no totals
PAUSE = "pause"  # name under which a paused learner waits
# heard: by its requests; moving: its count changes; busy: only its processors are in use; stuck: it
# beats, and neither is so; silent: it sends nothing.
Condition = Literal["heard", "moving", "busy", "stuck", "silent"]
LARGEST, LARGEST_COUNT = sys.float_info.max, 2**63 - 1  # what a reply can carry


class Peer(msgspec.Struct):
    """One process. `bins` holds (second, trajectories, tokens) of the last minute.

    `joining`: an actor has said HELLO and asked for no ticket yet; a learner has only beaten.
    `generated`: tokens that processes of this name sampled while this buffer listened; `reported`:
    the last report of the present one, None before the first. `left`: it has announced its end.
    `doing`: the activity that held up its slowest ticket, and the time of that report.
    `behind_since`: the time since which its `weights` have been too old and the same.
    `held`: the newest weights that its process has held; `visible`: that it could fetch.
    `failed`: the last failure that it reported, and the time of that report.
    `beat`: its newest heartbeat, and the times of the last beat, of the last with another count,
    and of the last that said busy.
    """

    first: float
    seen: float
    bins: deque[list[int]] = msgspec.field(default_factory=deque)
    waits: dict[str, tuple[str, float]] = {}  # reason and since when, by request
    generated: int = 0
    reported: int | None = None
    left: bool = False
    joining: bool = False
    doing: tuple[str, float] | None = None
    weights: WeightId | None = None
    held: WeightId | None = None
    visible: WeightId | None = None
    behind_since: float | None = None
    failed: tuple[str, float] | None = None
    counters: dict[str, float] = {}  # its last report, by metric name
    seconds: dict[str, float] = {}  # of its process by activity, by metric name
    host: str = ""
    host_cpu_share: float | None = None  # of its newest gauges
    gauges_due: float = 0.0  # time from which its next gauges are recorded
    beat: Beat | None = None
    beat_at: float = -math.inf
    moved_at: float = -math.inf
    busy_at: float = -math.inf

    def count(self, tokens: int, now: float) -> None:
        """Count a trajectory with so many ACTION tokens."""
        second, bins = int(now), self.bins
        while bins and bins[0][0] <= now - WINDOW_S:
            bins.popleft()
        if not bins or bins[-1][0] != second:
            bins.append([second, 0, 0])
        newest = bins[-1]
        newest[1] += 1
        newest[2] += tokens

    def greet(self) -> None:
        """Note a new process: its tokens count from 0, it holds and waits for nothing yet."""
        self.beat, self.beat_at, self.moved_at, self.busy_at = None, *[-math.inf] * 3
        self.held = self.visible = None
        self.joining = True
        self.waits, self.doing, self.behind_since = {}, None, None
        if self.reported is None:
            self.reported = 0

    def report(self, generated: int) -> None:
        """Add the tokens sampled since its last report; fewer than before means a new process.

        For a process older than this buffer, counting begins with its first report.
        """
        before = generated if self.reported is None else self.reported
        self.generated += generated - before if generated >= before else generated
        self.reported = generated

    def take_in(self, beat: Beat, now: float) -> None:
        """Note a heartbeat; one of an earlier process of this name is ignored."""
        before = self.beat
        if before is not None and beat.incarnation < before.incarnation:
            return
        if before is None or beat.incarnation > before.incarnation:
            self.moved_at = self.busy_at = now
        elif (beat.count, beat.phase) != (before.count, before.phase):
            self.moved_at = now
        if beat.busy:
            self.busy_at = now
        self.beat, self.beat_at = beat, now

    def condition(self, now: float, within_s: float) -> tuple[Condition, float]:
        """Return the condition of the process, and the seconds for which it shows no progress."""
        if self.joining:
            within_s = max(within_s, START_S)
        if now - self.seen <= within_s:
            return "heard", 0.0
        if now - self.beat_at > within_s:
            return "silent", now - max(self.seen, self.beat_at)
        if now - self.moved_at <= within_s:
            return "moving", 0.0
        if now - self.busy_at <= within_s:
            return "busy", now - self.moved_at
        return "stuck", now - max(self.moved_at, self.busy_at)

    @property
    def worked_at(self) -> float:
        """Time of its last request, or of the last work that its heartbeats show."""
        return max(self.seen, self.moved_at, self.busy_at)

    @property
    def phase(self) -> str:
        """The activity that its last heartbeat names, "" without one."""
        return self.beat.phase[:REASON_CHARS] if self.beat is not None else ""

    def hold(self, weights: WeightId | None, behind: bool, now: float) -> None:
        """Note its weights; `behind`: it should have newer ones."""
        if not behind:
            self.behind_since = None
        elif self.behind_since is None or weights != self.weights:
            self.behind_since = now
        self.weights = weights

    def see(self, held: WeightId | None, visible: WeightId | None) -> None:
        """Note weights of its process. A parked LEASE repeats older ones."""
        self.held = _newest(self.held, held)
        self.visible = _newest(self.visible, visible)

    def rates(self, now: float) -> tuple[float, float]:
        """Trajectories and tokens per second over the last minute, or since it was first heard."""
        bins = [one for one in self.bins if one[0] > now - WINDOW_S]
        window = min(WINDOW_S, max(1.0, now - self.first))
        return sum(one[1] for one in bins) / window, sum(one[2] for one in bins) / window


class Activity:
    """Processes that have contacted the buffer, which began to listen at `began`.

    `learner` is the one that last asked for a take. `departed` and `departed_tokens` hold the sums
    of actors that were restarted, or forgotten for good: totals never fall. A silent actor is not
    missed any more, but its reports are kept, as it may come back and report the same totals.
    `granted`: time of the first ticket. `data_from`: members that were done when the learner began
    to wait for its take; `data_s`: the seconds for which it waited for its last take. `step_s`:
    the longest step that a heartbeat told of.
    """

    def __init__(self, began: float = 0.0) -> None:
        self.began = began
        self.peers: dict[str, Peer] = {}  # the longest silent first
        self.actors: set[str] = set()
        self.learner: str | None = None
        self.granted: float | None = None
        self.data_from = 0
        self.data_s = 0.0
        self.step_s = 0.0
        self.metrics: dict[str, None] = {}  # names, in the order of their first report
        self.departed: dict[str, float] = {}
        self.departed_tokens = 0
        self._asking: set[str] = set()  # processes that wait for tickets
        self._silent: dict[str, Peer] = {}  # reports of actors not missed, the longest silent first

    def seen(self, name: str, now: float) -> Peer:
        peer = self.peers.pop(name, None) or self._silent.pop(name, None) or Peer(now, now)
        self.peers[name] = peer
        peer.seen = now
        if name not in self.actors:
            peer.joining = False
        if len(self.peers) > PEERS:
            self._drop(next(other for other in self.peers if other != self.learner))
        return peer

    def beat(self, name: str, beat: Beat, now: float) -> str:
        """Note a heartbeat; return the reason if it is refused, else ""."""
        if not (0 <= beat.share <= 1 and 0 <= beat.cpu_share <= 1):
            return f"share, cpu_share: {beat.share}, {beat.cpu_share}"
        if not (0 <= beat.step_s < math.inf and 0 <= beat.left_s < math.inf):
            return f"step_s, left_s: {beat.step_s}, {beat.left_s}"
        known = self.peers.get(name)
        peer, before = known or self.seen(name, now), known and known.beat
        if beat.role == "learner":
            begins = known is None or (before and beat.incarnation > before.incarnation)
            peer.joining = peer.joining or bool(begins)
        peer.take_in(beat, now)
        self.step_s = max(self.step_s, beat.step_s)
        if beat.role == "learner" and self.learner is None:
            self.learner = name
        return ""

    def worked_at(self) -> float:
        """Return the time of the last work of an actor, by its heartbeats and trajectories."""
        last = -math.inf
        for peer in (self.peers[name] for name in self.actors):
            arrived = peer.bins[-1][0] if peer.bins else -math.inf
            last = max(last, peer.moved_at, peer.busy_at, arrived)
        return last

    def forget(self, now: float) -> None:
        """Forget silent processes: participants after an hour, others after a minute."""
        for name, peer in list(self.peers.items()):
            silent_s = now - peer.seen
            if silent_s <= WINDOW_S:
                break
            part = peer.counters or peer.reported is not None or name in self.actors
            if name != self.learner and (silent_s > GONE_S or peer.left or not part):
                self._drop(name)

    def _drop(self, name: str) -> None:
        peer = self.peers.pop(name)
        self._asking.discard(name)
        if name not in self.actors and peer.reported is None:
            return  # no actor: other processes report gauges, which end with them
        self.actors.discard(name)
        self._silent[name] = Peer(
            peer.seen,
            peer.seen,
            generated=peer.generated,
            reported=peer.reported,
            counters=peer.counters,
            seconds=peer.seconds,
            host=peer.host,
        )
        if len(self._silent) > PEERS:
            gone = self._silent.pop(next(iter(self._silent)))
            self.departed_tokens += gone.generated
            self.fold(gone)

    def fold(self, peer: Peer) -> None:
        """Add its counters to those of departed processes: it is gone, or begins anew."""
        for name, value in (peer.counters | peer.seconds).items():
            if name not in ENGINE_LEVELS:
                self.departed[name] = _sum(self.departed.get(name, 0.0), value)
        peer.counters, peer.seconds = {}, {}

    def store_counters(self, name: str, values: dict[str, float]) -> str | None:
        """Store the counters of a process; return the reason if they are refused."""
        if len(values) > METRICS:
            return f"values: {len(values)} metrics, at most {METRICS} are taken"
        long = next((metric for metric in values if len(metric) > NAME_CHARS), None)
        if long is not None:
            return f"values: the name {long[:NAME_CHARS]!r}… has more than {NAME_CHARS} characters"
        for metric in values:
            if len(self.metrics) < METRICS:
                self.metrics.setdefault(metric)
        self.peers[name].counters = {m: v for m, v in values.items() if m in self.metrics}
        return None

    def store_seconds(self, name: str, seconds: dict[str, float]) -> None:
        """Store the seconds of an actor by activity; leave out unknown activities."""
        known = {one: seconds[one] for one in (*ACTOR, GENERATIONS) if one in seconds}
        before = self.peers[name].seconds
        for one, value in known.items():  # a parked LEASE repeats smaller ones
            metric = f"{TOTALS}{one}"
            before[metric] = max(value, before.get(metric, 0.0))

    def waits(self, name: str, request: str, reason: str, now: float) -> None:
        """Note that `name` waits; its waiting time goes on if it was waiting already."""
        waits = self.peers[name].waits
        reason = reason[:REASON_CHARS]
        waits[request] = (reason, waits.get(request, (reason, now))[1])
        if request == "lease":
            self._asking.add(name)

    def served(self, name: str, request: str) -> None:
        self.peers[name].waits.pop(request, None)
        if request == "lease":
            self._asking.discard(name)

    def activate(self, name: str) -> Peer:
        """Register the actor of this name as active."""
        self.actors.add(name)
        peer = self.peers[name]
        peer.left = peer.joining = False
        return peer

    def depart(self, name: str) -> None:
        """Note that the actor asks for nothing any more."""
        peer = self.peers[name]
        peer.left = True
        peer.behind_since = None
        self.served(name, "lease")

    def alive(self, now: float, within_s: float) -> int:
        """Number of actors that were heard, or worked by their heartbeats, within so many seconds,
        and have not announced their end."""
        return sum(self._here(name, now, within_s) for name in self.actors)

    def asking(self, now: float, within_s: float) -> set[str]:
        """Names of the living actors that wait for tickets."""
        return {
            name for name in self._asking if name in self.actors and self._here(name, now, within_s)
        }

    def _here(self, name: str, now: float, within_s: float) -> bool:
        peer = self.peers[name]
        return not peer.left and now - peer.worked_at <= within_s

    def generated(self) -> int:
        """Tokens that all actors have sampled, as far as reported."""
        known = sum(peer.generated for peer in self._known())
        return min(self.departed_tokens + known, LARGEST_COUNT)

    def counters(self) -> dict[str, float]:
        """Counters of all processes, added up by name; finite whatever they report."""
        sums = dict(self.departed)
        for peer in self._known():
            for name, value in (peer.counters | peer.seconds).items():
                if name not in ENGINE_LEVELS:
                    sums[name] = _sum(sums.get(name, 0.0), value)
        reused, prefilled = (sums.get(f"engine/{one}", 0.0) for one in ("reused", "prefilled"))
        if reused + prefilled > 0:
            sums["engine/reused_share"] = reused / (reused + prefilled)
        return sums

    def _known(self) -> Iterator[Peer]:
        """Iterate over the processes whose reports count."""
        return chain(self.peers.values(), self._silent.values())

    def host_cpu_share(self, now: float, within_s: float) -> dict[str, float]:
        """Processors in use of the least busy host of living actors, and those that this run's
        processes use there, both by its least busy host; empty if unknown."""
        living = [self.peers[name] for name in self.actors if self._here(name, now, within_s)]
        known = [one.host_cpu_share for one in living if one.host_cpu_share is not None]
        own = {one.host: 0.0 for one in living if one.beat is not None}
        for peer in self.peers.values():
            if peer.host in own and peer.beat is not None and now - peer.beat_at <= within_s:
                own[peer.host] += peer.beat.cpu_share
        found = {HOST_CPU_SHARE: min(known)} if known else {}
        return found | ({RUN_CPU_SHARE: min(1.0, *own.values())} if own else {})

    def engine_levels(self, now: float, within_s: float) -> dict[str, float]:
        """Means over living actors of what holds in their engines at their newest reports."""
        living = (self.peers[name] for name in self.actors if self._here(name, now, within_s))
        reports, means = [one.counters for one in living], dict[str, float]()
        for name in ENGINE_LEVELS:
            known = [one[name] for one in reports if math.isfinite(one.get(name, math.nan))]
            if known:
                means[name] = sum(known) / len(known)
        return means

    def starting(self, now: float) -> str:
        """Describe the actors if none of them has asked for a ticket yet, else return ""."""
        if not self.actors or not all(self.peers[name].joining for name in self.actors):
            return ""
        first, *others = sorted(self.actors)
        peer, more = self.peers[first], f" and {len(others)} more" if others else ""
        return f"{first}{more}: {peer.phase or 'start'}, {now - peer.seen:.0f} s"

    def learner_reasons(self) -> list[str]:
        """Return the reasons why the learner waits."""
        waits = {} if self.learner is None else self.peers[self.learner].waits
        return [reason for reason, _ in waits.values()]

    def learner_waits(self, now: float) -> str:
        """Describe the learner and the time since its last request."""
        if self.learner is None:
            return "the learner, not heard yet"
        peer = self.peers[self.learner]
        heard = f"last heard {now - max(peer.seen, peer.beat_at):.1f} s ago"
        if peer.beat is None or not peer.beat.step_s:
            return f"{self.learner}, {heard}"
        return f"{self.learner}, {heard} in step {peer.beat.step}, {peer.phase}"


def _newest(one: WeightId | None, other: WeightId | None) -> WeightId | None:
    return max((weights for weights in (one, other) if weights is not None), default=None)


def _sum(one: float, other: float) -> float:
    """Add two finite numbers and keep the sum finite: infinity cannot be sent."""
    return max(-LARGEST, min(LARGEST, one + other))
