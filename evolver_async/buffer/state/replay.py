"""Takes: the groups that the learner gets next, what becomes of them, and their repetition.

Pure and event-sourced, as `admission` is: `choose` changes nothing, and every change is the
consequence of a journal record.
"""

from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from evolver_async.buffer.state.admission import Admission
from evolver_async.buffer.state.groups import HeldGroup, Take
from evolver_async.buffer.state.samplers import sampler_of
from evolver_async.errors import Inconsistency
from evolver_async.lineages import Fork
from evolver_async.schema import SCRIPTED, WeightId

SAME, DIVERGED = "same", "diverged"  # repeated takes, and those after one that was not repeated
UNREPORTED = "unreported"  # the fate of groups that a learner trained without reporting it


class Replay(Admission):
    """The groups that are held, and the takes that are made of them."""

    def choose(self) -> list[int]:
        """The groups of the next take; empty where there are too few, or stragglers to wait for."""
        size = self.numbers.groups_per_step
        if len(self.by_state["ready"]) < size:
            return []
        chosen = list(islice(self._preferred(), size))
        if len(chosen) < size:
            return []
        if not self._in_time(chosen):
            key = lambda held: self._slack(held) if held.wait else 1 << 30  # noqa: E731
            chosen = sorted(self._preferred(), key=key)[:size]
            if any(self.stragglers()) and not self._in_time(chosen):
                return []
        return [held.group_id for held in chosen]

    def stragglers(self) -> Iterator[HeldGroup]:
        """The open groups that the learner waits for before their time runs out."""
        return (held for held in self.by_state["open"].values() if held.wait)

    def take(self, take: int, stage: int, groups: list[int]) -> None:
        """Hand these groups to the learner, for the first time or once more."""
        at = self.at
        taken = at.takes.setdefault(take, Take(at.lineage, stage, groups, at.head))
        if taken.lineage != at.lineage:
            if groups != taken.groups:
                raise Inconsistency(f"take {take}: {groups}, it had {taken.groups}")
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
        """Reason why a take cannot be repeated in `stage`; "" if it can."""
        return self.at.unrepeatable(take, stage, self.stages[stage].max_staleness)

    def drop_repeats(self, take: int, reason: str) -> None:
        """Drop the repetition of a take, for this reason, and of all later ones.

        Their groups are ready again.
        """
        at = self.at
        gone = {number: at.takes.pop(number) for number in sorted(at.takes) if number >= take}
        for number, taken in gone.items():
            at.count_repeat(reason if number == take else DIVERGED)
            for group_id in taken.groups:
                self._put_back(at.groups[group_id])

    def report(self, take: int, version: int, fates: dict[int, str]) -> list[HeldGroup]:
        """End one use of each group; return the groups that end with it."""
        taken = self.at.takes[take]
        head = WeightId(lineage=taken.lineage, step=version)
        if head != self.at.head:  # the lags counted to it stay valid
            self.at.head = head
        self.at.reports += 1
        if taken.version not in (None, version):
            self.at.diverge(take)
        taken.version = version
        return self._use(take, fates)

    def settle(self, take: int) -> list[HeldGroup]:
        """End the unreported takes before `take`; return the groups that end with them.

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
        """Begin a lineage that continues `parent` before `take`; undo the uses since then.

        The takes since then are to be repeated; with `discard` they are forgotten and their groups
        are ready. Returns the closed groups that are held again, with their former fate and reason.
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
            at.kept = min(at.kept, take)  # earlier takes are never repeated
            at.takes = {number: taken for number, taken in at.takes.items() if number < take}
        at.next_take = take
        at.zero_spread = 0
        at.floor = min(at.floor, version)  # a later stage's may be ahead of the head
        return reopened

    def keep(self, take: int, checkpoint_bytes: int = 0) -> None:
        """Forget the takes before `take`: none of them will be repeated."""
        at = self.at
        at.checkpoint_bytes = checkpoint_bytes
        at.kept = max(at.kept, take)
        at.takes = {number: taken for number, taken in at.takes.items() if number >= at.kept}
        for held in list(self.by_state["closed"].values()):
            if max(held.fates) < at.kept:
                self._forget(held)

    def uses_before(self, held: HeldGroup, take: int) -> int:
        """Count the uses of the group before `take`."""
        return sum(number < take for number in held.fates)

    def refills_exhausted(self) -> bool:
        """True if dynamic sampling has left out its maximum and a take still lacks groups."""
        numbers = self.numbers
        if not 0 < numbers.refills <= self.at.zero_spread:
            return False
        ready = sum(map(self._trainable, self.by_state["ready"].values()))
        return ready < numbers.groups_per_step

    def _trainable(self, held: HeldGroup) -> bool:
        """True if a ready group may be in the next take."""
        at_stage = held.stage == self.at.stage
        return at_stage and not self.too_old(held) and not self.lacks_spread(held)

    def _preferred(self) -> Iterator[HeldGroup]:
        """The candidates for the next take, the first of it first.

        Of those in order of arrival no more are examined than are asked for.
        """
        ready, numbers = self.by_state["ready"].values(), self.numbers
        if numbers.kind in SCRIPTED or numbers.sampler == "fifo":
            return filter(self._trainable, sorted(ready, key=attrgetter("order")))
        rank, params = sampler_of(numbers.sampler), numbers.sampler_params
        key = lambda held: (rank(held, self.lag(held), params), held.order)  # noqa: E731
        return iter(sorted(filter(self._trainable, ready), key=key))

    def _slack(self, held: HeldGroup) -> int:
        """Count the versions that the group can still wait, if missing members play old weights."""
        return self.numbers.max_staleness - self.at.worst_lag(held, self.at.head)

    def _in_time(self, chosen: list[HeldGroup]) -> bool:
        """True if all waited-for groups can be trained in time after a take of `chosen`.

        Earliest deadline first: with B groups a version, at most k·B uses may be due within k
        versions.
        """
        if not self.waiting:
            return True
        due: dict[int, int] = {}
        taken = {held.group_id for held in chosen}
        for held in map(self.at.groups.__getitem__, self.waiting):
            uses = held.uses_left - (held.group_id in taken)
            if held.state in ("open", "ready") and uses:
                slack = max(0, self._slack(held))
                due[slack] = due.get(slack, 0) + uses
        total = 0
        for slack in sorted(due):
            total += due[slack]
            if total > slack * self.numbers.groups_per_step:
                return False
        return True

    def _put_back(self, held: HeldGroup) -> None:
        """Return a group to its state after a use: taken if another use is due, else ready."""
        self._enter(held, "taken" if self.at.promised(held.group_id) else "ready")
