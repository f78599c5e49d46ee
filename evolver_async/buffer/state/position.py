"""State of groups, takes and lineages, as snapshots hold it.

Also questions that it answers alone: the lag of a group, the takes to repeat after a RESUME.
"""

import msgspec

from evolver_async.buffer.state.groups import CountedLag, HeldGroup, Take
from evolver_async.lineages import Fork, version_lag
from evolver_async.schema import WeightId


class Position(msgspec.Struct):
    """Groups, takes and lineages.

    `kept`: the oldest take that may come back. `checkpoint_bytes`: the size of the newest
    checkpoint. `floor`: the version with which the stage began; older ones were not trained for the
    stage and sample nothing for it. `zero_spread`: groups that dynamic sampling left out since the
    last take. `reports`: DONEs, repeated takes included. `repeats`: takes that a RESUME had undone,
    by outcome: "same", or the reason why they were not repeated. `begun`: the lineage that
    each learner process began; `incarnation`: of the last.

    A take from `next_take` on is of an abandoned lineage and is to be repeated.
    """

    stage: int = 0
    floor: int = 0
    lineage: int = 0
    head: WeightId | None = None
    forks: dict[int, Fork] = {}
    next_group: int = 0
    next_order: int = 0
    next_take: int = 0
    kept: int = 0
    checkpoint_bytes: int = 0
    zero_spread: int = 0
    groups: dict[int, HeldGroup] = {}
    takes: dict[int, Take] = {}
    reports: int = 0
    repeats: dict[str, int] = {}
    begun: dict[str, int] = {}
    incarnation: int = 0

    def lag(self, held: HeldGroup, head: WeightId | None) -> int:
        """Count the most versions from weights of a group, unfinished members included."""
        if head is None:
            return 0
        counted = held.counted_lag
        if counted is None or counted.head is not head:
            held.counted_lag = counted = self._count(held.sampled, counted, head)
        return counted.lag

    def _count(
        self, sampled: frozenset[WeightId], before: CountedLag | None, head: WeightId
    ) -> CountedLag:
        """Count from `head` the lag of a group that `sampled` from these weights."""
        if before is not None and before.grows and before.head.lineage == head.lineage:
            passed = head.step - before.head.step
            if passed >= 0:
                return CountedLag(head, before.lag + passed, True)
        known = [one for one in sampled if one.lineage != head.lineage or one.step <= head.step]
        lags = [version_lag(head, weights, self.forks) for weights in known]
        return CountedLag(head, max(lags, default=0), bool(lags))

    def worst_lag(self, held: HeldGroup, head: WeightId | None) -> int:
        """Count them as if every unfinished member came with the oldest weights allowed to it."""
        if head is None:
            return 0
        demanded = (version_lag(head, weights, self.forks) for weights in held.demanded)
        return max(self.lag(held, head), *demanded, 0)

    def promised(self, group_id: int) -> bool:
        """True if a take that is under way, or to be repeated, holds the group."""
        return any(group_id in taken.groups for taken in self.takes.values() if not taken.reported)

    def unrepeatable(self, take: int, stage: int, max_staleness: int) -> str:
        """Reason why `take` cannot be repeated in `stage`; "" if it can.

        Their staleness is that of the first time, as long as the takes before were repeated.
        """
        taken = self.takes[take]
        if taken.stage != stage:
            return "stage"
        held = [self.groups[group_id] for group_id in taken.groups]
        head = taken.head or self.head
        if any(one.kind == "rollout" and self.lag(one, head) > max_staleness for one in held):
            return "stale"
        return ""

    def diverge(self, take: int) -> None:
        """Reset the lag of the takes after `take`: they train other weights than the first time."""
        for number, taken in self.takes.items():
            if number > take:
                taken.head = taken.version = None

    def count_repeat(self, outcome: str) -> None:
        self.repeats[outcome] = self.repeats.get(outcome, 0) + 1
