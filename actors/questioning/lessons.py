"""Lessons of explorations: solutions of the tasks made of them, and what they tried in vain."""

from collections.abc import Sequence
from typing import NamedTuple

from actors.questioning.action_replay import ReplayedEpisode
from evolver_async.schema import Task
from evolver_async.wire.transcripts import Transcript, Turn

MAX_REFUSED = 64  # turns in a lesson


class Solved(NamedTuple):
    """New task, the member whose exploration it comes from, and the replay of its solution."""

    task: Task
    member: int
    played: ReplayedEpisode


def longest(accepted: Sequence[Solved]) -> list[Solved]:
    """Leave out the tasks whose solution is the beginning of another one's."""
    ways = [one.played.actions for one in accepted]
    return [
        one
        for one, way in zip(accepted, ways, strict=True)
        if not any(len(other) > len(way) and other[: len(way)] == way for other in ways)
    ]


def lesson(name: str, solution: ReplayedEpisode, refused: Sequence[Turn]) -> list[Transcript]:
    """Return a solution as a success, and refused turns in its states as failures.

    All of them have `name` as the trajectory they come from.
    """
    states = {turn.state for turn in solution.turns}
    tried = [[turn] for turn in refused if turn.state in states][:MAX_REFUSED]
    plays = [(solution.turns, True), *((turns, False) for turns in tried)]
    return [
        Transcript(
            trajectory_id=name,
            reward=float(success),
            success=success,
            experience_ids=[],
            turns=turns,
        )
        for turns, success in plays
    ]
