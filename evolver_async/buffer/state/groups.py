"""Facts about one group and one take: plain data, no rules."""

from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

from evolver_async.buffer.state.evaluations import SetEpisode
from evolver_async.rewards import spread
from evolver_async.schema import Kind, Task, WeightId

UNTRAINED = ("eval", "explore")  # kinds that end with their last member and are never trained
ZERO_SPREAD = "zero_spread"  # the reason of groups that dynamic sampling leaves out
FORK = "fork"  # the reason of groups that a RESUME made too old
GroupState = Literal["open", "ready", "taken", "closed"]
Location = tuple[int, int, int, int]  # journal segment, offset, bytes, crc32


class Owner(msgspec.Struct):
    """Last grant of a member: its actor, its attempt, and the head at that moment.

    `weights`: the oldest that may play it, at most as new as the head.
    """

    actor: str
    attempt: int
    head: WeightId | None
    weights: WeightId | None = None


class ArrivedMember(msgspec.Struct):
    """A member that has arrived. `guided`: experience was in its context; `sampled`: its oldest and
    newest weights in each lineage; `location`: the place of its trajectory in the journal;
    `players`: reward and success of each that moved, in an episode of several."""

    attempt: int
    tokens: int
    bytes: int
    reward: float
    success: bool
    guided: bool
    sampled: list[WeightId]
    location: Location
    players: dict[str, tuple[float, bool]] = {}


class CountedLag(NamedTuple):
    """Most versions between weights of a group and `head`. `grows`: one more with each version of
    the head's lineage."""

    head: WeightId
    lag: int
    grows: bool


class HeldGroup(msgspec.Struct, kw_only=True, dict=True):
    """One granted group; `arrive` and `grant` change its members.

    `uses_left` counts the uses still to come, the one under way included; `fates` holds the outcome
    of past ones by take: "trained", or the reason why selection left the group out. `order` is the
    place in the queue of ready groups. `wait`: the learner waits for this group's stragglers.
    `pinned`: the weights of an evaluation episode; `episode`: its place in a set of `eval.sets`,
    None in the deciding one. `guided`: the members that experience is to guide. `failures`: its
    tickets that could not be run.
    """

    group_id: int
    task: Task
    kind: Kind
    stage: int
    members: list[int]
    owners: dict[int, Owner]
    uses_left: int
    state: GroupState = "open"
    attempt: int = 0
    wait: bool = False
    pinned: WeightId | None = None
    episode: SetEpisode | None = None
    guided: list[int] = []
    arrived: dict[int, ArrivedMember] = {}
    failures: int = 0
    order: int = -1
    fates: dict[int, str] = {}

    def arrive(self, member: int, facts: ArrivedMember) -> None:
        kept = self._kept_lag(member, facts)
        missing = [other for other in self.missing if other != member]
        self.arrived[member] = facts
        vars(self).clear()
        self.missing = missing
        if kept is not None:
            self.counted_lag = kept

    def grant(self, member: int, owner: Owner) -> None:
        self.owners[member] = owner
        vars(self).clear()

    def _kept_lag(self, member: int, facts: ArrivedMember) -> CountedLag | None:
        """The counted lag, if the grant counted with the weights that arrive; else None."""
        owner = self.owners.get(member)
        if member in self.arrived or owner is None or not facts.sampled:
            return None
        oldest, newest = facts.sampled[0], facts.sampled[-1]
        same = oldest == owner.head and newest.lineage == oldest.lineage
        return self.counted_lag if same else None

    # Kept until a member arrives or is granted again: each TAKE asks them of every group.

    @cached_property
    def spread(self) -> float:
        """The population std of the rewards that arrived, exactly 0 if all are equal; of several
        players the largest one."""
        return max(spread([reward for reward, _ in outcomes]) for outcomes in self._outcomes())

    @cached_property
    def success_spread(self) -> float:
        """The population std of the successes that arrived, as 0 and 1; of several players the
        largest one."""
        return max(spread([float(won) for _, won in outcomes]) for outcomes in self._outcomes())

    def _outcomes(self) -> list[list[tuple[float, bool]]]:
        """Rewards and successes that arrived: one list for each player, or one of the episodes."""
        by_player: dict[str, list[tuple[float, bool]]] = {}
        for member in self.arrived.values():
            for name, outcome in (member.players or {"": (member.reward, member.success)}).items():
                by_player.setdefault(name, []).append(outcome)
        return [*by_player.values()]

    @cached_property
    def missing(self) -> list[int]:
        return [member for member in self.members if member not in self.arrived]

    @cached_property
    def counted_lag(self) -> CountedLag | None:
        """Result of the last `Position.lag`; None if the members have changed since."""
        return None

    @cached_property
    def sampled(self) -> frozenset[WeightId]:
        """Weights of the members that arrived, and the head when the others were granted."""
        weights: list[WeightId | None] = []
        for member in self.arrived.values():
            weights += member.sampled
        weights += [self.owners[member].head for member in self.missing]
        return frozenset(one for one in weights if one is not None)

    @property
    def demanded(self) -> frozenset[WeightId]:
        """Oldest weights that may play the members that have not arrived."""
        weights = [self.owners[member].weights for member in self.missing]
        return frozenset(one for one in weights if one is not None)

    @property
    def tokens(self) -> int:
        return sum(member.tokens for member in self.arrived.values())

    @property
    def bytes(self) -> int:
        return sum(member.bytes for member in self.arrived.values())

    @property
    def segments(self) -> list[int]:
        """The journal's segments with its trajectories: none of a kind that is only counted."""
        if self.kind in UNTRAINED:
            return []
        return [member.location[0] for member in self.arrived.values()]

    @property
    def fate(self) -> tuple[str, str]:
        """Fate and reason of a closed group: trained if it ever was, else filtered."""
        if "trained" in self.fates.values():
            return "trained", ""
        return "filtered", self.fates[max(self.fates)]


def ending(held: HeldGroup, reason: str) -> tuple[str, str]:
    """Return the fate and reason with which a group ends that is evicted for `reason`.

    A group that was used before keeps its fate of then. Leaving out equal rewards counts as a
    filter, as the learner's filters do.
    """
    if held.fates:
        return held.fate
    return "filtered" if reason == ZERO_SPREAD else "evicted", reason


class Take(msgspec.Struct):
    """The groups of one SAMPLE.

    `lineage`: the newest one that received them. `head`: the newest weights at the time of choice,
    from which their lags count, in a repetition too; None if a repetition would train other weights
    than these. `version`: the version after the newest DONE, None before the first one.
    """

    lineage: int
    stage: int
    groups: list[int]
    head: WeightId | None
    reported: bool = False
    version: int | None = None
