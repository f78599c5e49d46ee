"""Grading by a language model of synthetic tasks that the environment cannot check.

    score 60-100   achieved, less for errors and detours
    score 0-40     not achieved
    41-59          invalid
    irrelevant     0, whatever the score
    repetition     at most 20 if the same action was taken in the same situation three times in a
                   row (0 if irrelevant); counted here, not by the language model

The reward is score / 100. Without a valid answer there is no grade.
"""

from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from actors.llm.json_client import JsonClient, as_json, decode_json, step_records, truncate
from actors.questioning.questioning_prompts import GRADE
from evolver_async.schema import Task, Trajectory
from evolver_async.wire.transcripts import Turn

ACHIEVED, FAILED = 60, 40  # lowest score of a success, highest score of a failure
REPEATS, REPEATED_SCORE = 3, 20  # so many repetitions limit the score to this


class Grade(NamedTuple):
    """Grade of an episode. `reward` in 0..1; `success`: True if the task was achieved."""

    reward: float
    success: bool


class GradeAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer of the language model."""

    relevant: bool
    achieved: bool
    score: Annotated[int, msgspec.Meta(ge=0, le=100)]


async def grade(client: JsonClient, task: Task, turns: list[Turn], ending: str) -> Grade | None:
    """Grade one episode; None if there is no valid answer. Raise Unavailable.

    `ending`: observation after the last action.
    """
    answered = await client.ask(GRADE, _question(task, turns, ending), parse_grade)
    if answered is None:
        return None
    score = answered.score if answered.relevant else 0
    if repetitive(turns):
        score = min(score, REPEATED_SCORE)
    return Grade(score / 100, score >= ACHIEVED)


def parse_grade(answer: str) -> GradeAnswer:
    """Parse an answer.

    Raise ValueError for another form, a score between failure and success, or a score that
    contradicts `achieved`.
    """
    answered = decode_json(answer, GradeAnswer)
    if FAILED < answered.score < ACHIEVED:
        raise ValueError(f"a score of {answered.score} is neither failure nor success")
    if answered.relevant and answered.achieved != (answered.score >= ACHIEVED):
        raise ValueError(f"a score of {answered.score} with achieved={answered.achieved}")
    return answered


def repetitive(turns: list[Turn]) -> bool:
    """Return True if an action was repeated in the same situation `REPEATS` times in a row."""
    run = 0
    for before, turn in zip([None, *turns], turns, strict=False):
        same = (
            before is not None
            and turn.action == before.action
            and turn.observation == before.observation
        )
        run = run + 1 if same else 1
        if run >= REPEATS:
            return True
    return False


def regrade(trajectory: Trajectory, given: Grade) -> None:
    """Make the grade the outcome of a trajectory, as the reward of its last turn."""
    trajectory.reward, trajectory.success = given.reward, given.success
    trajectory.turn_rewards = np.zeros_like(trajectory.turn_rewards)
    trajectory.turn_rewards[-1:] = given.reward


def _question(task: Task, turns: list[Turn], ending: str) -> str:
    after = [*(turn.observation for turn in turns[1:]), ending]
    (query,) = truncate([task.query])
    record = {
        "task": query,
        "reference": truncate(task.reference or []),
        "beginning": truncate([turns[0].observation])[0] if turns else "",
        "agent": step_records([(t.said, seen) for t, seen in zip(turns, after, strict=True)]),
    }
    return as_json(record)
