"""Progress of a ticket, and the current activity of each of its members."""

import asyncio
from dataclasses import dataclass, field

from evolver_async.metrics.activity import ACTOR_LEVELS, ActivityClock
from evolver_async.protocol import messages
from evolver_async.schema import WeightId


@dataclass(eq=False)
class TicketProgress:
    """Progress of one ticket. Times are the loop's.

    `count`: tokens of whole turns and environment steps; the lease is renewed while it grows.
    `queued`: the ticket waits for others of this actor, so their progress counts as its own.
    `generating`: members whose turn the engine has, or will have; meanwhile all tokens of the
    engine count. `played`: members whose episode is over. `last`: each member's last activity and
    its seconds. `clock`: that of the process. `agents_until`: the time until which agents may run;
    meanwhile all work of the actor counts, as that between their calls is not seen.
    """

    count: int = 0
    queued: bool = False
    generating: int = 0
    played: int = 0
    last: dict[int, tuple[str, float]] = field(default_factory=dict)
    agents_until: float = 0.0
    clock: ActivityClock = field(default_factory=lambda: ActivityClock(ACTOR_LEVELS))
    _doing: dict[int | None, tuple[str, float]] = field(default_factory=dict)

    def during(self, member: int | None, what: str) -> "_Activity":
        """Record an activity of a member, or of all members if None, while the block runs."""
        return _Activity(self.last, self._doing, member, what)

    def restart(self, member: int) -> None:
        """Let a member's activity begin now: it has made progress."""
        if (doing := self._doing.get(member)) is not None:
            self._doing[member] = (doing[0], asyncio.get_running_loop().time())

    def run_agents(self, limit_s: float) -> None:
        """Note the start of an agent that is ended after `limit_s`."""
        limit = asyncio.get_running_loop().time() + limit_s
        self.agents_until = max(self.agents_until, limit)

    def shared(self, work: int) -> int:
        """Return the part of the actor's work that counts beside `count`."""
        now = asyncio.get_running_loop().time()
        return work * (self.generating > 0 or now < self.agents_until)

    def slowest(self) -> tuple[str, float]:
        """Describe the activity that has lasted longest, with its member; also its seconds."""
        if not self._doing:
            return "nothing", 0.0
        member, (what, since) = min(self._doing.items(), key=lambda item: item[1][1])
        seconds = asyncio.get_running_loop().time() - since
        whose = "" if member is None else f"member {member}: "
        return f"{whose}{what} for {seconds:.1f} s", seconds


class _Activity:
    """Block during which a member, or all, do something; see `TicketProgress.during`."""

    __slots__ = ("_before", "_doing", "_last", "_member", "_now", "_what")

    def __init__(
        self,
        last: dict[int, tuple[str, float]],
        doing: dict[int | None, tuple[str, float]],
        member: int | None,
        what: str,
    ) -> None:
        self._last = last
        self._doing = doing
        self._member = member
        self._what = what

    def __enter__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._before = self._doing.get(self._member)
        self._doing[self._member] = (self._what, self._now())

    def __exit__(self, *_: object) -> None:
        began = self._doing.pop(self._member)[1]
        if self._member is not None:
            self._last[self._member] = (self._what, self._now() - began)
        if self._before is not None:
            self._doing[self._member] = self._before


def renewal(
    progresses: dict[int, TicketProgress],
    work: int,
    weights: WeightId | None,
    visible: WeightId | None,
    clock: ActivityClock,
    launch: int,
) -> messages.Renew:
    """Report the progress and the slowest activity of an actor's tickets, by group.

    `work`: tokens of the actor's engine and seconds of its agents between their calls, since its
    start. As it is common to all tickets, one that waits tells no more than when it is played.
    """
    shared = {g: p.shared(work) for g, p in progresses.items()}
    # No more than a ticket tells once it is played itself: it would seem to stand still then.
    waiting = max(shared.values(), default=0) or sum(p.count for p in progresses.values())
    slowest = {group: progress.slowest() for group, progress in progresses.items()}
    return messages.Renew(
        progress={g: waiting if p.queued else p.count + shared[g] for g, p in progresses.items()},
        doing={group: text for group, (text, _) in slowest.items()},
        still_s={group: seconds for group, (_, seconds) in slowest.items()},
        weights=weights,
        visible=visible,
        seconds=clock.totals(),
        launch=launch,
    )
