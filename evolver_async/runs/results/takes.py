"""Takes of a run as its learner received them: the groups in their order, from the journal."""

from dataclasses import dataclass

from evolver_async.buffer.log.reader import JournalReader
from evolver_async.buffer.state.groups import Take
from evolver_async.runs.results.group_histories import TRAINED, RunHistory
from evolver_async.runs.results.trajectories import TrajectoryGone
from evolver_async.schema import Group, Trajectory


@dataclass(frozen=True)
class RecordedTakes:
    """Complete takes of the line of weights that a run followed, by number.

    A take is complete if the learner has reported it, and only then was its step trained for good.
    """

    history: RunHistory
    reader: JournalReader

    @property
    def complete(self) -> dict[int, Take]:
        """The reported takes, in order."""
        line = self.history.line
        return {number: line[number] for number in sorted(line) if line[number].reported}

    def missing(self, number: int) -> int | None:
        """Return the first group of a take whose data is not kept, None if all are."""
        for group_id in self.history.line[number].groups:
            group = self.history.groups.get(group_id)
            if group is None or not group.arrived:
                return group_id
            if not all(self.reader.kept(member.location) for member in group.arrived.values()):
                return group_id
        return None

    def groups(self, number: int) -> list[Group]:
        """Decode the groups of a take. Raises TrajectoryGone if one is not kept any more."""
        taken = self.history.line[number]
        return [self._group(group_id, number, taken) for group_id in taken.groups]

    def trained(self, number: int) -> set[int]:
        """Return the numbers of the groups that the run trained in a take."""
        return {
            group_id
            for group_id in self.history.line[number].groups
            for use in self.history.groups[group_id].uses
            if use.take == number and not use.abandoned and use.fate == TRAINED
        }

    def _group(self, group_id: int, number: int, taken: Take) -> Group:
        group = self.history.groups[group_id]
        before = [use for use in group.uses if use.take < number and not use.abandoned]
        return Group(
            group_id=group_id,
            task=group.task,
            kind=group.kind,
            stage=group.stage,
            use=len(before),
            head=taken.head,
            trajectories=[
                self._trajectory(group_id, group.arrived[member].location)
                for member in sorted(group.arrived)
            ],
        )

    def _trajectory(self, group_id: int, place: tuple[int, int, int, int]) -> Trajectory:
        found = self.reader.trajectory(place)
        if found is None:
            raise TrajectoryGone(
                f"group {group_id}: its journal segment was removed meanwhile;"
                " buffer.archive=all keeps the segments"
            )
        return found
