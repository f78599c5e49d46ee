"""Progress of a ticket, and the current activity of each of its members."""

import asyncio
from dataclasses import dataclass, field

from evolver_async.metrics.activity import ACTOR_LEVELS, ActivityClock
from evolver_async.schema import WeightId
from evolver_async.wire import messages


@dataclass(eq=False)
class TicketProgress:
    """Progress of one ticket. Times are the loop's.

    `count`: tokens of whole turns and environment steps; the lease is renewed while it grows.
    `queued`: the ticket waits for others of this actor, so their progress counts as its own.
    `generating`: members whose turn the engine has, or will have; meanwhile all tokens of the
    engine count. `waiting`: members that wait for an agent elsewhere. `played`: members whose
    episode is over. `last`: each member's last activity and its seconds. `clock`: that of the
    process. `agents_until`: the latest end of its agents. Until then, and while an agent is waited
    for, all work of the actor counts, as the work of agents between their calls is not seen.
    """

    count: int = 0
    queued: bool = False
    generating: int = 0
    waiting: int = 0
    played: int = 0
    last: dict[int, tuple[str, float]] = field(default_factory=dict)
    agents_until: float = 0.0
    clock: ActivityClock = field(default_factory=lambda: ActivityClock(ACTOR_LEVELS))
    reported: int = 0  # progress in the last RENEW
    _doing: dict[int | None, tuple[str, float]] = field(default_factory=dict)
    _shared: set[int | None] = field(default_factory=set)

    def during(self, member: int | None, what: str, *, shared: bool = False) -> "_Activity":
        """Record an activity of a member, or of all members if None, while the block runs.

        `shared`: it goes on while the ticket's count does, as a generation by the engine.
        """
        return _Activity(self, member, what, shared)

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
        return work * (self.generating > 0 or self.waiting > 0 or now < self.agents_until)

    def slowest(self, *, moved: bool = False) -> tuple[str, float]:
        """Describe the activity that has lasted longest, with its member; also the seconds for
        which it stands still: 0 for a shared one if the ticket has `moved`."""
        if not self._doing:
            return "nothing", 0.0
        now = asyncio.get_running_loop().time()

        def still_s(member: int | None) -> float:
            return 0.0 if moved and member in self._shared else now - self._doing[member][1]

        member = min(self._doing, key=lambda one: (-still_s(one), self._doing[one][1]))
        what, since = self._doing[member]
        whose = "" if member is None else f"member {member}: "
        return f"{whose}{what} for {now - since:.1f} s", still_s(member)


class _Activity:
    """Block during which a member, or all, do something; see `TicketProgress.during`."""

    __slots__ = ("_before", "_doing", "_last", "_member", "_now", "_shared", "_shares", "_what")

    def __init__(
        self, progress: TicketProgress, member: int | None, what: str, shares: bool
    ) -> None:
        self._last = progress.last
        self._doing = progress._doing
        self._shared = progress._shared
        self._member = member
        self._what = what
        self._shares = shares

    def __enter__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._before = self._doing.get(self._member), self._member in self._shared
        self._enter((self._what, self._now()), self._shares)

    def __exit__(self, *_: object) -> None:
        began = self._doing.pop(self._member)[1]
        if self._member is not None:
            self._last[self._member] = (self._what, self._now() - began)
        doing, shared = self._before
        self._shared.discard(self._member)
        if doing is not None:
            self._enter(doing, shared)

    def _enter(self, doing: tuple[str, float], shared: bool) -> None:
        self._doing[self._member] = doing
        if shared:
            self._shared.add(self._member)
        else:
            self._shared.discard(self._member)


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
    start. It is common to all tickets: a waiting ticket reports no more than it will when it is
    played.
    """
    shared = {g: p.shared(work) for g, p in progresses.items()}
    # No more than a ticket tells once it is played itself: it would seem to stand still then.
    waiting = max(shared.values(), default=0) or sum(p.count for p in progresses.values())
    counts = {g: waiting if p.queued else p.count + shared[g] for g, p in progresses.items()}
    slowest = {g: p.slowest(moved=counts[g] != p.reported) for g, p in progresses.items()}
    for group, progress in progresses.items():
        progress.reported = counts[group]
    return messages.Renew(
        progress=counts,
        doing={group: text for group, (text, _) in slowest.items()},
        still_s={group: seconds for group, (_, seconds) in slowest.items()},
        weights=weights,
        visible=visible,
        seconds=clock.totals(),
        launch=launch,
    )
