"""Seconds of a process by activity; every second of its wall time belongs to exactly one.

An actor runs many episodes in one loop. Its seconds are those of the loop and not of the episodes:
of all conditions that hold at a moment, the first in the order of its levels counts.
"""

import asyncio
import time
from collections.abc import Callable, Mapping

OTHER = "other"
ENGINE = "engine"
GENERATIONS = "generations"  # seconds of all turns in generation: they overlap

# Conditions of an actor.
LOADING, BLOCKING, GENERATING, STEPPING = "loading", "blocking", "generating", "stepping"
PLAYING, JUDGING, DELIVERING = "playing", "judging", "delivering"
AWAITING, LEASING = "awaiting", "leasing"

ACTOR_LEVELS = {
    LOADING: "weights",
    BLOCKING: "environment",  # a call holds up the loop
    GENERATING: "rollout",  # the loop's own work between the engine's steps
    STEPPING: "environment",  # episodes wait for environments, and none for the engine
    PLAYING: "rollout",
    JUDGING: "judge",
    DELIVERING: "push",
    AWAITING: "weights",
    LEASING: "tickets",
}
LEARNER_LEVELS = {
    "wait": "data",
    "validate": "validate",  # whichever pass it makes
    "anchor": "anchor",
    "reference": "reference",
    "value": "value",
    "forward": "forward",
    "backward": "backward",
    "distill": "distill",
    "teacher": "teacher",
    "publish": "publish",  # an update waits for the copy of the version before
    "optimizer": "optimizer",
    "report": "report",
    "checkpoint": "checkpoint",
    "train": OTHER,  # holds some of the others
}
ACTOR = (ENGINE, *dict.fromkeys(ACTOR_LEVELS.values()), OTHER)
LEARNER = tuple(dict.fromkeys(LEARNER_LEVELS.values()))
HOST_CPU_SHARE = "throughput/actor/host_cpu_share"
RUN_CPU_SHARE = "throughput/actor/run_cpu_share"  # of the run's own processes on their hosts
SYNC_S = "throughput/buffer/sync_s"
TOTALS = "throughput/actor_s/"  # seconds of all actors, from the buffer to the learner


class ActivityClock:
    """Wall-clock seconds of one process by activity, from `begin` on.

    `levels`: the activity of each condition, the one that counts first at the head. `busy`: total
    seconds of an engine that computes beside; its seconds are ENGINE whatever else holds.
    """

    def __init__(self, levels: Mapping[str, str], busy: Callable[[], float] | None = None) -> None:
        self.seconds = dict.fromkeys((*levels.values(), OTHER), 0.0)
        if busy is not None:
            self.seconds[ENGINE] = 0.0
        self._levels = levels
        self._held = dict.fromkeys(levels, 0)
        self._blocks = {condition: _Block(self._change, condition) for condition in levels}
        self._generated_s = 0.0  # of generations that have ended, less the beginnings of the others
        self.changes = 0  # of conditions, so far
        self._activity = OTHER
        self._busy = busy
        self._busy_s = 0.0
        self._now = time.perf_counter
        self._since: float | None = None

    def begin(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Start to measure by the monotonic clock `now`."""
        self._now = now
        self._since = now()
        self._generated_s = -self._held.get(GENERATING, 0) * self._since
        self._busy_s = self._busy() if self._busy is not None else 0.0

    @property
    def activity(self) -> str:
        """The present activity, an engine's left out. Any thread may read it."""
        return self._activity

    def during(self, condition: str) -> "_Block":
        """Hold a condition while the block runs; blocks may overlap in any order."""
        return self._blocks[condition]

    def settle(self) -> dict[str, float]:
        """Add the seconds until now to their activity; return the totals."""
        if self._since is None:
            return self.seconds
        now = self._now()
        passed, self._since = now - self._since, now
        if self._busy is not None:
            busy_s = self._busy()
            computed, self._busy_s = min(passed, busy_s - self._busy_s), busy_s
            self.seconds[ENGINE] += computed
            passed -= computed
        self.seconds[self._activity] += passed
        return self.seconds

    def skip(self) -> None:
        """Leave out the time since the last settlement; not while a generation runs."""
        if self._since is not None:
            self._since = self._now()

    def drain(self) -> dict[str, float]:
        """Return the seconds since the last call, and start from 0."""
        seconds = dict(self.settle())
        self.seconds = dict.fromkeys(seconds, 0.0)
        return seconds

    def totals(self) -> dict[str, float]:
        """Return an actor's totals as it reports them to the buffer."""
        seconds = self.settle()
        running_s = self._held[GENERATING] * (self._since or 0.0)
        return seconds | {GENERATIONS: self._generated_s + running_s}

    def _change(self, condition: str, by: int) -> None:
        """Count a block that holds a condition; settle only if that changes what is measured."""
        self.changes += 1
        if condition == GENERATING and self._since is not None:
            self._generated_s -= by * self._now()
        held = self._held
        before = held[condition]
        held[condition] = before + by
        if before and before + by:
            return
        activity = OTHER
        for one, count in held.items():
            if count:
                activity = self._levels[one]
                break
        if activity != self._activity:
            self.settle()
            self._activity = activity


class _Block:
    """Block that holds a condition of a clock; it may be entered again while it runs."""

    __slots__ = ("_change", "_condition")

    def __init__(self, change: Callable[[str, int], None], condition: str) -> None:
        self._change = change
        self._condition = condition

    def __enter__(self) -> None:
        self._change(self._condition, 1)

    def __exit__(self, *_: object) -> None:
        self._change(self._condition, -1)


def wall_clock() -> Callable[[], float]:
    """Return the monotonic clock of this process.

    In a serial run that of the loop, which stands still while the learner computes.
    """
    return getattr(asyncio.get_running_loop(), "ran_s", time.perf_counter)


def shares(role: str, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a role: its seconds, and the share of every activity in them."""
    whole = sum(seconds.values())
    if whole <= 0:
        return {}
    named = {f"throughput/{role}/{name}": value / whole for name, value in seconds.items()}
    return {f"throughput/{role}/seconds": whole, **named}


class ActorShares:
    """Shares of the actors between two rows, from the totals in the buffer's counters."""

    def __init__(self) -> None:
        self._before: dict[str, float] | None = None

    def take_in(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Return the counters with the shares since the last call in place of the totals.

        The first call only notes the totals, as does one after a restart of the buffer.
        """
        names = [name for name in counters if name.startswith(TOTALS)]
        others = {name: value for name, value in counters.items() if name not in names}
        totals = {name.removeprefix(TOTALS): counters[name] for name in names}
        before, self._before = self._before, totals
        if before is None or any(totals.get(name, 0.0) < old for name, old in before.items()):
            return others
        passed = {name: value - before.get(name, 0.0) for name, value in totals.items()}
        generation_s = passed.pop(GENERATIONS, 0.0)
        found = shares("actor", passed)
        if found:
            found["throughput/actor/generations"] = generation_s / found["throughput/actor/seconds"]
        return others | found
