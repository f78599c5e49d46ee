"""The replay: which groups exist, how many more may, which are fresh, which the learner gets.

Pure and event-sourced: questions (`room`, `too_old`, `choose`) change nothing, and every change is
the consequence of a journal record. Trajectories themselves are not here, only facts about them.

Liveness. Outstanding uses (those still to come, of all groups) never exceed `(S+1-lag)·B` by a
grant. Where no group fits any more, nothing is open and nothing taken, more than `(S+1-lag)·B -
reuse` uses are ready, each group has at most `reuse`, and `reuse ≤ S+1-lag`: so at least B groups
are ready and the learner can go on. Open groups end by arriving, by a lease that runs out and is
granted again, or by eviction; taken ones by DONE or RESUME.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from evolver_async.buffer.state.groups import (
    UNTRAINED,
    ZERO_SPREAD,
    ArrivedMember,
    GroupState,
    HeldGroup,
    Owner,
    Take,
)
from evolver_async.buffer.state.position import Position
from evolver_async.schema import SCRIPTED, Fork, Kind, Task, WeightId

KINDS = get_args(Kind)
SAME, DIVERGED = "same", "diverged"  # repeated takes, and those after one that was not repeated
UNREPORTED = "unreported"  # the fate of groups that were trained by a learner that could not say so


@dataclass(frozen=True)
class StageNumbers:
    """The numbers of one stage. `kind`: the tickets it trains on.

    `refills`: dynamic sampling, which trains no group of rollouts whose members all have the same
    reward, gives up after so many of them since the last take; 0 trains those as well.
    """

    kind: Literal["rollout", "demo", "branch"]
    group_size: int
    groups_per_step: int
    max_staleness: int
    reuse: int
    weight_lag: int
    sampler: Literal["fifo", "freshest", "prioritized"]
    wait: bool
    demo_groups: int
    refills: int = 0


class Replay:
    """All groups that are held, and the closed ones that a RESUME may still bring back."""

    def __init__(self, stages: list[StageNumbers]) -> None:
        self.stages = stages
        self.restore(Position())

    def restore(self, at: Position) -> None:
        self.at = at
        self.by_state: dict[GroupState, dict[int, HeldGroup]] = {
            "open": {},
            "ready": {},
            "taken": {},
            "closed": {},
        }
        for held in at.groups.values():
            self.by_state[held.state][held.group_id] = held
        # kept up to date where groups change: both are asked for by every waiting actor
        self.uses = {kind: sum(held.uses_left for held in self.live(kind)) for kind in KINDS}
        self.bytes = sum(held.bytes for kind in KINDS for held in self.live(kind))

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

    # ---- admission

    def limit(self) -> int:
        """The most outstanding uses of the kind of groups that this stage trains on."""
        numbers = self.numbers
        if numbers.kind in SCRIPTED:
            return numbers.demo_groups * numbers.reuse
        return (numbers.max_staleness + 1 - numbers.weight_lag) * numbers.groups_per_step

    def outstanding(self) -> int:
        """Uses still to come, of all groups of the kind that this stage trains on."""
        return self.uses[self.numbers.kind]

    def room(self) -> int:
        """How many groups may be granted now."""
        if self.numbers.kind == "rollout" and self.at.head is None:
            return 0
        return max(0, self.limit() - self.outstanding()) // self.numbers.reuse

    def oldest_allowed(self) -> WeightId | None:
        """The oldest weights with which a rollout granted now can still be trained in time."""
        head = self.at.head
        if self.numbers.kind in SCRIPTED or head is None:
            return None
        # After a RESUME from before the stage the head itself may be older than the floor.
        floor = min(self.at.floor, head.step)
        return WeightId(lineage=head.lineage, step=max(floor, head.step - self.numbers.weight_lag))

    def open(
        self,
        group_id: int,
        task: Task,
        kind: Kind,
        stage: int,
        members: list[int],
        actor: str,
        wait: bool,
        pinned: WeightId | None,
    ) -> None:
        """A group is granted."""
        held = HeldGroup(
            group_id=group_id,
            task=task,
            kind=kind,
            stage=stage,
            members=members,
            owners={member: Owner(actor, 0, self.at.head) for member in members},
            uses_left=0 if kind in UNTRAINED else self.numbers.reuse,
            wait=wait,
            pinned=pinned,
        )
        self.at.next_group = group_id + 1
        self.at.groups[group_id] = self.by_state["open"][group_id] = held
        self.uses[kind] += held.uses_left

    def reissue(self, group_id: int, members: list[int], actor: str) -> None:
        """Missing members are granted again, under a new attempt."""
        held = self.at.groups[group_id]
        held.attempt += 1
        for member in members:
            held.owners[member] = Owner(actor, held.attempt, self.at.head)

    def arrive(self, group_id: int, member: int, facts: ArrivedMember) -> HeldGroup:
        """The first copy of a member has come; the last one makes the group ready."""
        held = self.at.groups[group_id]
        held.arrived[member] = facts
        self.bytes += facts.bytes
        if not held.missing and held.kind not in UNTRAINED:
            held.order = self.at.next_order
            self.at.next_order += 1
            self._enter(held, "ready")
        return held

    def evict(self, group_id: int, reason: str = "") -> HeldGroup:
        """The group ends here. It is remembered only if a past use of it can be asked for again."""
        held = self.at.groups[group_id]
        self.at.zero_spread += reason == ZERO_SPREAD
        self._close(held)
        if not held.fates:
            self._forget(held)
        return held

    # ---- staleness

    def lag(self, held: HeldGroup) -> int:
        """Versions from the oldest weights of the group, members under way too, to the head."""
        return self.at.lag(held, self.at.head)

    def too_old(self, held: HeldGroup) -> bool:
        """Whether the group can never be trained: even the very next version is too far."""
        return (
            held.kind == "rollout"
            and held.state in ("open", "ready")
            and self.lag(held) > self.stages[held.stage].max_staleness
        )

    def lacks_spread(self, held: HeldGroup) -> bool:
        """Whether dynamic sampling leaves a group out: there is nothing to compare in it."""
        return (
            held.kind == "rollout"
            and held.state == "ready"
            and self.stages[held.stage].refills > 0
            and held.spread == 0
        )

    def refills_exhausted(self) -> bool:
        """Whether dynamic sampling has left out as many groups as it may for one take, in vain."""
        numbers = self.numbers
        in_vain = len(self._ready()) < numbers.groups_per_step
        return in_vain and 0 < numbers.refills <= self.at.zero_spread

    # ---- takes

    def choose(self) -> list[int]:
        """The groups of the next take; empty where there are too few, or stragglers to wait for."""
        size = self.numbers.groups_per_step
        ready = self._ready()
        if len(ready) < size:
            return []
        ready.sort(key=self._preference())
        chosen = ready[:size]
        if not self._in_time(chosen):
            ready.sort(key=lambda held: self._slack(held) if held.wait else 1 << 30)
            chosen = ready[:size]
            if self.stragglers() and not self._in_time(chosen):
                return []
        return [held.group_id for held in chosen]

    def stragglers(self) -> list[HeldGroup]:
        """The open groups that the learner waits for before their time runs out."""
        return [held for held in self.by_state["open"].values() if held.wait]

    def take(self, take: int, stage: int, groups: list[int]) -> None:
        """The learner gets these groups, for the first time or once more."""
        at = self.at
        taken = at.takes.setdefault(take, Take(at.lineage, stage, groups, at.head))
        if taken.lineage != at.lineage:
            assert groups == taken.groups, f"take {take}: {groups}, it had {taken.groups}"
            taken.lineage, taken.head = at.lineage, taken.head or at.head
            at.count_repeat(SAME)
        at.next_take = take + 1
        at.zero_spread = 0
        for group_id in groups:
            self._enter(at.groups[group_id], "taken")

    def to_repeat(self, take: int) -> Take | None:
        """The take of this number of an abandoned lineage, whose groups are handed out again."""
        taken = self.at.takes.get(take)
        return None if taken is None or taken.lineage == self.at.lineage else taken

    def unrepeatable(self, take: int, stage: int) -> str:
        """The reason for which a take cannot be repeated in `stage`; "" if it can."""
        return self.at.unrepeatable(take, stage, self.stages[stage].max_staleness)

    def drop_repeats(self, take: int, reason: str) -> None:
        """A take is not repeated, for this reason, so no later one is: their groups are ready."""
        at = self.at
        gone = {number: at.takes.pop(number) for number in sorted(at.takes) if number >= take}
        for number, taken in gone.items():
            at.count_repeat(reason if number == take else DIVERGED)
            for group_id in taken.groups:
                self._put_back(at.groups[group_id])

    def report(self, take: int, version: int, fates: dict[int, str]) -> list[HeldGroup]:
        """One use of each group is over; returns the groups that end with it."""
        taken = self.at.takes[take]
        self.at.head = WeightId(lineage=taken.lineage, step=version)
        self.at.reports += 1
        if taken.version not in (None, version):
            self.at.diverge(take)
        taken.version = version
        return self._use(take, fates)

    def settle(self, take: int) -> list[HeldGroup]:
        """Ends the takes before `take` that no DONE came for; returns the groups that end with it.

        A learner that resumes from `take` has trained them: its DONE was lost with the learner.
        """
        return [
            held
            for number, taken in self.at.takes.items()
            if number < take and not taken.reported
            for held in self._use(number, dict.fromkeys(taken.groups, UNREPORTED))
        ]

    def _use(self, take: int, fates: dict[int, str]) -> list[HeldGroup]:
        taken = self.at.takes[take]
        taken.reported = True
        closed = []
        for group_id in taken.groups:
            held = self.at.groups[group_id]
            held.fates[take] = fates[group_id]
            held.uses_left -= 1
            self.uses[held.kind] -= 1
            if held.uses_left:
                self._put_back(held)
            else:
                self._close(held)
                closed.append(held)
        return closed

    def resume(
        self, lineage: int, parent: int, take: int, version: int, *, discard: bool = False
    ) -> list[tuple[HeldGroup, str, str]]:
        """A new lineage continues `parent` before `take`; the uses since then are given back.

        The takes since then are to be repeated; with `discard` they are forgotten and their groups
        are ready. Returns the closed groups that are held again, with the fate and reason they had
        ended with.
        """
        at = self.at
        at.forks[lineage] = Fork(lineage=lineage, parent=parent, step=version)
        at.lineage, at.head = lineage, WeightId(lineage=lineage, step=version)
        undone = {number: at.takes[number] for number in sorted(at.takes) if number >= take}
        reopened = []
        for number, taken in undone.items():
            taken.reported = False
            for group_id in taken.groups:
                held = at.groups[group_id]
                if held.state == "closed":
                    reopened.append((held, *held.fate))
                    self.bytes += held.bytes
                self._enter(held, "ready" if discard else "taken")
                if held.fates.pop(number, None) is not None:
                    held.uses_left += 1
                    self.uses[held.kind] += 1
        if undone:
            at.stage = undone[min(undone)].stage
        if discard:
            at.kept = min(at.kept, take)  # what was taken before is no longer asked for
            at.takes = {number: taken for number, taken in at.takes.items() if number < take}
        at.next_take = take
        at.zero_spread = 0
        return reopened

    def keep(self, take: int, checkpoint_bytes: int = 0) -> None:
        """No take before `take` will be asked for again."""
        at = self.at
        at.checkpoint_bytes = checkpoint_bytes
        at.kept = max(at.kept, take)
        at.takes = {number: taken for number, taken in at.takes.items() if number >= at.kept}
        for held in list(self.by_state["closed"].values()):
            if max(held.fates) < at.kept:
                self._forget(held)

    def uses_before(self, held: HeldGroup, take: int) -> int:
        """How often the group was used before `take`."""
        return sum(number < take for number in held.fates)

    # ---- within

    def _ready(self) -> list[HeldGroup]:
        """The groups that the next take may be made of."""
        return [
            held
            for held in self.by_state["ready"].values()
            if held.stage == self.at.stage
            and not self.too_old(held)
            and not self.lacks_spread(held)
        ]

    def _preference(self) -> Callable[[HeldGroup], tuple[float, int]]:
        sampler = self.numbers.sampler
        if self.numbers.kind in SCRIPTED or sampler == "fifo":
            return lambda held: (0.0, held.order)
        if sampler == "freshest":
            return lambda held: (self.lag(held), held.order)
        return lambda held: (-held.spread, held.order)

    def _slack(self, held: HeldGroup) -> int:
        """How many more versions the group can wait, its members under way held back by the lag."""
        lag = self.lag(held) + (self.numbers.weight_lag if held.missing else 0)
        return self.numbers.max_staleness - lag

    def _in_time(self, chosen: list[HeldGroup]) -> bool:
        """Whether all waited-for groups can be trained in time if the learner takes `chosen` now.

        Earliest deadline first: with B groups a version, at most k·B uses may be due within k
        versions.
        """
        due: dict[int, int] = {}
        taken = {held.group_id for held in chosen}
        for held in (*self.by_state["open"].values(), *self.by_state["ready"].values()):
            uses = held.uses_left - (held.group_id in taken)
            if held.wait and uses:
                slack = max(0, self._slack(held))
                due[slack] = due.get(slack, 0) + uses
        total = 0
        for slack in sorted(due):
            total += due[slack]
            if total > slack * self.numbers.groups_per_step:
                return False
        return True

    def _enter(self, held: HeldGroup, state: GroupState) -> None:
        del self.by_state[held.state][held.group_id]
        held.state = state
        self.by_state[state][held.group_id] = held

    def _put_back(self, held: HeldGroup) -> None:
        """A use of the group is over, or given up; another one may be under way or promised."""
        self._enter(held, "taken" if self.at.promised(held.group_id) else "ready")

    def _close(self, held: HeldGroup) -> None:
        self._enter(held, "closed")
        self.bytes -= held.bytes
        self.uses[held.kind] -= held.uses_left
        held.uses_left = 0
        held.owners.clear()

    def _forget(self, held: HeldGroup) -> None:
        del self.by_state["closed"][held.group_id]
        del self.at.groups[held.group_id]
