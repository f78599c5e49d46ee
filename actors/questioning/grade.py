"""What an episode of a synthetic task is worth where only a language model can tell.

    score 60-100   achieved, less for errors and detours
    score 0-40     not achieved
    41-59          forbidden: an answer that says so is none
    irrelevant     0, whatever else is said
    repetition     at most 20 where the same action led to the same thing three times on end
                   (and 0 where irrelevant); this is counted here, not asked for

The reward is the score / 100. Without an answer that can be read there is no grade: none is
invented.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from actors.llm.asking import Asker, convert, cut, shown, steps_shown
from actors.questioning.prompts import GRADE
from evolver_async.protocol.transcripts import Turn
from evolver_async.schema import Task, Trajectory

ACHIEVED, FAILED = 60, 40  # the least score of a success, the most of a failure
REPEATS, REPEATED = 3, 20  # so often the same caps the score at this


@dataclass(frozen=True)
class Grade:
    """`reward` in 0..1; `success`: the task was achieved."""

    reward: float
    success: bool


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the language model is asked for."""

    relevant: bool
    achieved: bool
    score: Annotated[int, msgspec.Meta(ge=0, le=100)]


async def grade(asker: Asker, task: Task, turns: list[Turn], ending: str) -> Grade | None:
    """The grade of one episode; None where no answer can be read. Raises Unavailable.

    `ending`: what its last action led to.
    """
    verdict = await asker.ask(GRADE, _question(task, turns, ending), parse_verdict)
    if verdict is None:
        return None
    score = verdict.score if verdict.relevant else 0
    if repetitive(turns):
        score = min(score, REPEATED)
    return Grade(score / 100, score >= ACHIEVED)


def parse_verdict(answer: str) -> Verdict:
    """ValueError for another form, a score between failure and success, or one that contradicts
    the verdict."""
    verdict = convert(answer, Verdict)
    if FAILED < verdict.score < ACHIEVED:
        raise ValueError(f"a score of {verdict.score} is neither failure nor success")
    if verdict.relevant and verdict.achieved != (verdict.score >= ACHIEVED):
        raise ValueError(f"a score of {verdict.score} with achieved={verdict.achieved}")
    return verdict


def repetitive(turns: list[Turn]) -> bool:
    """Whether the same action was made in the same situation so often on end."""
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
    """Make the grade the outcome of a trajectory; it comes with the last turn."""
    trajectory.reward, trajectory.success = given.reward, given.success
    trajectory.turn_rewards = np.zeros_like(trajectory.turn_rewards)
    trajectory.turn_rewards[-1:] = given.reward


def _question(task: Task, turns: list[Turn], ending: str) -> str:
    after = [*(turn.observation for turn in turns[1:]), ending]
    (query,) = cut([task.query])
    record = {
        "task": query,
        "reference": cut(task.reference or []),
        "beginning": cut([turns[0].observation])[0] if turns else "",
        "agent": steps_shown([(t.said, seen) for t, seen in zip(turns, after, strict=True)]),
    }
    return shown(record)
