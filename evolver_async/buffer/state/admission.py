"""Groups that the buffer holds, how many more may be granted, and which are too old to train.

Pure and event-sourced: questions (`room`, `too_old`) change nothing, and every change is the
consequence of a journal record. Only facts about trajectories are here, not their contents.

The head is what DONE reported; an actor holds its weights only later. A ticket never demands newer
weights than its actor has `held` (`ActorWeights.held`). If those are `d` versions behind the head,
more than the lag that is allowed anyway, its group must fit into `(S+1-d)·B` uses: it is trained
before it is too old.

Liveness. Outstanding uses (those still to come, of all groups) never exceed `(S+1-lag)·B` by a
grant. The head stands still while the learner waits, so in the end an actor holds it. Where no
group fits any more, nothing is open and nothing taken, more than `(S+1-lag)·B -
reuse` uses are ready, each group has at most `reuse`, and `reuse ≤ S+1-lag`: so at least B groups
are ready and the learner can go on. Open groups end by arriving, by a lease that runs out and is
granted again, or by eviction; taken ones by DONE or RESUME. Groups of rows beside rollouts (kind
`demo`) count as these do, and never become too old.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from evolver_async.buffer.state.groups import (
    UNTRAINED,
    ZERO_SPREAD,
    ArrivedMember,
    GroupState,
    HeldGroup,
    Owner,
)
from evolver_async.buffer.state.position import Position
from evolver_async.buffer.state.records import Granted, Reissued
from evolver_async.schema import SCRIPTED, Kind, WeightId

KINDS = get_args(Kind)


@dataclass(frozen=True)
class StageNumbers:
    """Numbers of one stage. `kind`: the tickets that it trains on.

    `refills`: dynamic sampling, which trains no group of rollouts whose members all have equal
    rewards (`by_success`: all succeeded or all failed), gives up after so many of them since the
    last take; 0 trains those as well.
    `repeats_failed`: the task of a group that failed throughout is met again, guided.
    """

    kind: Literal["rollout", "demo", "branch"]
    group_size: int
    groups_per_step: int
    max_staleness: int
    reuse: int
    weight_lag: int
    sampler: str
    wait: bool
    demo_groups: int
    refills: int = 0
    by_success: bool = False
    repeats_failed: bool = False
    sampler_params: dict[str, Any] = field(default_factory=dict)


class Admission:
    """All groups that are held, and the closed ones that a RESUME may still bring back."""

    def __init__(self, stages: list[StageNumbers]) -> None:
        self.stages = stages
        self.restore(Position())

    def restore(self, at: Position) -> None:
        self.at = at
        self.by_state: dict[GroupState, dict[int, HeldGroup]]
        self.by_state = {state: {} for state in get_args(GroupState)}
        for held in at.groups.values():
            self.by_state[held.state][held.group_id] = held
        # kept up to date at every change: every waiting actor, or every take, reads them
        self.uses = {kind: sum(held.uses_left for held in self.live(kind)) for kind in KINDS}
        self.bytes = sum(held.bytes for kind in KINDS for held in self.live(kind))
        self.waiting = {
            held.group_id for held in at.groups.values() if held.wait and held.state != "closed"
        }

    @property
    def numbers(self) -> StageNumbers:
        return self.stages[self.at.stage]

    def live(self, kind: Kind) -> list[HeldGroup]:
        """Groups that are open, ready or taken."""
        return [
            held
            for state in ("open", "ready", "taken")
            for held in self.by_state[state].values()
            if held.kind == kind
        ]

    def limit(self, held: WeightId | None = None) -> int:
        """The most outstanding uses of the kind of groups that this stage trains on.

        Fewer for an actor if the newest weights that it has `held` are too far behind the head.
        """
        numbers = self.numbers
        if numbers.kind in SCRIPTED:
            return numbers.demo_groups * numbers.reuse
        head, lag = self.at.head, numbers.weight_lag
        if head is not None and held is not None:
            lag = max(lag, head.step - held.step)
        return max(0, numbers.max_staleness + 1 - lag) * numbers.groups_per_step

    def outstanding(self) -> int:
        """Uses still to come, of all groups that this stage trains on."""
        beside = self.uses["demo"] if self.numbers.kind == "rollout" else 0
        return self.uses[self.numbers.kind] + beside

    def room(self, held: WeightId | None) -> int:
        """The number of groups that may be granted now to an actor that has `held` these weights.

        None to one that holds none of this lineage and stage.
        """
        if self.numbers.kind == "rollout" and self.demanded(held) is None:
            return 0
        return max(0, self.limit(held) - self.outstanding()) // self.numbers.reuse

    def demanded(self, held: WeightId | None) -> WeightId | None:
        """The oldest weights with which an actor that has `held` these may play a rollout now.

        Never newer than `held`. None if it must get newer ones first.
        """
        oldest, head = self.oldest_allowed(), self.at.head
        if oldest is None or head is None or held is None or held.lineage != head.lineage:
            return None
        return min(oldest, held) if held.step >= min(self.at.floor, head.step) else None

    def oldest_allowed(self) -> WeightId | None:
        """The oldest weights with which a rollout granted now can still be trained in time."""
        head = self.at.head
        if self.numbers.kind in SCRIPTED or head is None:
            return None
        # After a RESUME from before the stage the head itself may be older than the floor.
        floor = min(self.at.floor, head.step)
        return WeightId(lineage=head.lineage, step=max(floor, head.step - self.numbers.weight_lag))

    def open(self, granted: Granted, stage: int) -> None:
        """Add a granted group."""
        group_id, kind = granted.group_id, granted.kind
        held = HeldGroup(
            group_id=group_id,
            task=granted.task,
            kind=kind,
            stage=stage,
            members=granted.members,
            owners={
                member: Owner(granted.actor, 0, self.at.head, granted.weights)
                for member in granted.members
            },
            uses_left=0 if kind in UNTRAINED else self.numbers.reuse,
            wait=granted.wait,
            pinned=granted.pinned,
            episode=granted.episode,
            guided=granted.guided,
        )
        self.at.next_group = group_id + 1
        self.at.groups[group_id] = self.by_state["open"][group_id] = held
        self.uses[kind] += held.uses_left
        if held.wait:
            self.waiting.add(group_id)

    def reissue(self, again: Reissued) -> None:
        """Grant missing members again, under a new attempt."""
        held = self.at.groups[again.group_id]
        held.attempt += 1
        for member in again.members:
            held.grant(member, Owner(again.actor, held.attempt, self.at.head, again.weights))

    def arrive(self, group_id: int, member: int, facts: ArrivedMember) -> HeldGroup:
        """Add the first copy of a member; the last member makes the group ready."""
        held = self.at.groups[group_id]
        held.arrive(member, facts)
        self.bytes += facts.bytes
        if not held.missing and held.kind not in UNTRAINED:
            held.order = self.at.next_order
            self.at.next_order += 1
            self._enter(held, "ready")
        return held

    def evict(self, group_id: int, reason: str = "") -> HeldGroup:
        """End the group. It is remembered only if a past use of it may be repeated."""
        held = self.at.groups[group_id]
        self.at.zero_spread += reason == ZERO_SPREAD
        self._close(held)
        if not held.fates:
            self._forget(held)
        return held

    def lag(self, held: HeldGroup) -> int:
        """Count the versions from the oldest weights of the group to the head."""
        return self.at.lag(held, self.at.head)

    def too_old(self, held: HeldGroup) -> bool:
        """True if the group can never be trained: even the very next version is too far."""
        return (
            held.kind == "rollout"
            and held.state in ("open", "ready")
            and self.lag(held) > self.stages[held.stage].max_staleness
        )

    def lacks_spread(self, held: HeldGroup) -> bool:
        """True if dynamic sampling leaves the group out: its rewards, or successes, are equal."""
        numbers = self.stages[held.stage]
        if held.kind != "rollout" or held.state != "ready" or not numbers.refills:
            return False
        return (held.success_spread if numbers.by_success else held.spread) == 0

    def _enter(self, held: HeldGroup, state: GroupState) -> None:
        del self.by_state[held.state][held.group_id]
        held.state = state
        self.by_state[state][held.group_id] = held
        if held.wait:
            (self.waiting.discard if state == "closed" else self.waiting.add)(held.group_id)

    def _close(self, held: HeldGroup) -> None:
        self._enter(held, "closed")
        self.bytes -= held.bytes
        self.uses[held.kind] -= held.uses_left
        held.uses_left = 0
        held.owners.clear()

    def _forget(self, held: HeldGroup) -> None:
        del self.by_state["closed"][held.group_id]
        del self.at.groups[held.group_id]
