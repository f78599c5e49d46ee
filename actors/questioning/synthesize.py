"""Explorations → candidates for tasks, each with a solution that the exploration suggests.

goals   a state that was reached is the goal, the way there the solution; no language model
llm     a language model words tasks and solutions out of what was done and seen
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from actors.formats.turns import SEPARATOR
from actors.llm.asking import convert, cut, shown, steps_shown
from actors.questioning.prompts import SYNTHESIS
from actors.questioning.replay import Played
from evolver_async.protocol.transcripts import Turn
from evolver_async.schema import Task

QUERY_CHARS = 1_000
SOLUTION_CHARS = 4_000  # all actions together: tasks travel, and are kept, with their solution


@dataclass(frozen=True, kw_only=True)
class Exploration:
    """One episode of a ticket, as it can be played again; `ending`: what it saw last."""

    member: int
    dynamics_seed: int
    turns: list[Turn]
    ending: str

    @property
    def actions(self) -> list[str]:
        read = [turn.action for turn in self.turns if turn.action]
        return [one.strip() for action in read for one in action.split(SEPARATOR)]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A task that may be. `member`, `dynamics_seed`: the exploration that it comes from."""

    task: Task
    confidence: float
    member: int
    dynamics_seed: int


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a language model is asked for."""

    query: Annotated[str, msgspec.Meta(min_length=1, max_length=QUERY_CHARS)]
    confidence: Annotated[float, msgspec.Meta(ge=0, le=1)]
    action_sequence: list[str]


def task_of(
    explored: Task, reference: list[str], *, goal: dict[str, Any] | None = None, query: str = ""
) -> Task:
    """The synthetic task whose goal these parameters or these words are.

    Its id is its content's: whoever finds the same task gives it the same name. Where there is a
    goal, the words do not count.
    """
    params = explored.params | (goal or {})
    content = [explored.env, explored.split, explored.map_seed, params, "" if goal else query]
    encoded = msgspec.json.encode(content, order="deterministic")
    digest = hashlib.blake2b(encoded, digest_size=12).hexdigest()
    return Task(
        task_id=f"{explored.env}/made/{digest}",
        env=explored.env,
        split=explored.split,
        map_seed=explored.map_seed,
        params=params,
        origin="synthetic",
        reference=reference,
        query=query,
    )


def from_goals(explored: Task, plays: list[tuple[Exploration, Played]]) -> list[Candidate]:
    """The states that were reached as goals, each once.

    The share of the explorations that reached a state tells how hard it is: those nearest to one
    half come first, of equals the one that took longest.
    """
    reached: dict[str, list[tuple[Exploration, Task]]] = {}
    for exploration, played in plays:
        seen = set()
        for count, goal in enumerate(played.goals, 1):
            if goal is None:
                continue
            task = task_of(explored, played.actions[:count], goal=goal)
            if task.task_id not in seen:
                seen.add(task.task_id)
                reached.setdefault(task.task_id, []).append((exploration, task))
    candidates = []
    for found in reached.values():
        exploration, task = min(found, key=lambda one: len(one[1].reference or ()))
        candidates.append(
            Candidate(
                task=task,
                confidence=len(found) / len(plays),
                member=exploration.member,
                dynamics_seed=exploration.dynamics_seed,
            )
        )
    candidates.sort(
        key=lambda one: (
            math.fabs(one.confidence - 0.5),
            -len(one.task.reference or ()),
            one.task.task_id,
        )
    )
    return candidates


def question(described: str, explored: Exploration, known: list[str], most: int) -> tuple[str, str]:
    """What a language model is asked for tasks with: the system's words and the question. There is
    at least one turn."""
    turns, ending = explored.turns, explored.ending or "(the exploration ended)"
    after = [*(turn.observation for turn in turns[1:]), ending]
    pairs = [(turn.said, seen) for turn, seen in zip(turns, after, strict=True)]
    record = {
        "beginning": cut([turns[0].observation])[0],
        "explored": steps_shown(pairs),
        "existing tasks": known,
    }
    return SYNTHESIS.format(most=most), f"{described}\n\n{shown(record)}"


def parse_proposals(answer: str, most: int) -> list[Proposal]:
    """The proposals in an answer, the surest first; ValueError where it is anything but a list of
    at most `most`."""
    proposals = convert(answer, list[Proposal])
    if len(proposals) > most:
        raise ValueError(f"{len(proposals)} tasks, asked for {most}")
    longest = max((sum(len(one) + 1 for one in p.action_sequence) for p in proposals), default=0)
    if longest > SOLUTION_CHARS:
        raise ValueError(f"a solution of {longest} characters")
    return sorted(proposals, key=lambda one: -one.confidence)
