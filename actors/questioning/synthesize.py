"""Candidates for tasks from explorations, each with a reference solution.

goals   a reached state becomes the goal, the actions up to it the solution; no language model
llm     a language model writes tasks and solutions from actions and observations
"""

import hashlib
from typing import Annotated, Any, NamedTuple

import msgspec

from actors.llm.json_client import as_json, decode_json, newest, step_records, truncate
from actors.questioning.action_replay import ReplayedEpisode
from actors.questioning.actions import ActionForm, WrittenAction
from actors.questioning.questioning_prompts import SYNTHESIS
from evolver_async.schema import Task
from evolver_async.wire.transcripts import Turn

QUERY_CHARS = 1_000
# Of all actions, as tasks are sent and stored with their solution; code is longer than a text.
SOLUTION_CHARS, CALLS_CHARS = 4_000, 16_000


class Exploration(NamedTuple):
    """Episode of an explore ticket, with all that a replay needs. `instructions`: those of its
    environment after `reset`; `ending`: last observation; `actions`: those that it was given."""

    member: int
    dynamics_seed: int
    turns: list[Turn]
    instructions: str
    ending: str
    actions: list[str]
    form: ActionForm

    def candidate(self, task: Task, confidence: float) -> "Candidate":
        """Make a candidate that comes from this exploration."""
        return Candidate(task, confidence, self.member, self.dynamics_seed, self.form)


class Candidate(NamedTuple):
    """Candidate for a task. `member`, `dynamics_seed`, `form`: of the exploration it comes from."""

    task: Task
    confidence: float
    member: int
    dynamics_seed: int
    form: ActionForm


class WrittenProposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Task in an answer of a language model."""

    query: Annotated[str, msgspec.Meta(min_length=1, max_length=QUERY_CHARS)]
    confidence: Annotated[float, msgspec.Meta(ge=0, le=1)]
    action_sequence: list[WrittenAction]


class Proposal(NamedTuple):
    """Task that a language model proposes. `solution`: actions as the environment takes them."""

    query: str
    confidence: float
    solution: list[str]


def task_of(
    explored: Task, reference: list[str], *, goal: dict[str, Any] | None = None, query: str = ""
) -> Task:
    """Make the synthetic task with this goal or query.

    Its id is a hash of its content, so equal tasks have equal ids. With a goal, the query is not
    part of the content.
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


def from_goals(explored: Task, plays: list[tuple[Exploration, ReplayedEpisode]]) -> list[Candidate]:
    """Make one candidate for each state that was reached.

    The share of explorations that reached a state measures its difficulty: candidates are sorted by
    its distance from one half, then by descending length of the solution.
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
        candidates.append(exploration.candidate(task, len(found) / len(plays)))

    def rank(one: Candidate) -> tuple[float, int, str]:
        return abs(one.confidence - 0.5), -len(one.task.reference or ()), one.task.task_id

    return sorted(candidates, key=rank)


def question(described: str, explored: Exploration, known: list[str], most: int) -> tuple[str, str]:
    """Return system message and question that ask for tasks. There must be at least one turn.

    `known`: queries of existing tasks, oldest first; the newest that fit are shown.
    """
    turns, ending = explored.turns, explored.ending or "(the exploration ended)"
    after = [*(turn.observation for turn in turns[1:]), ending]
    pairs = [(turn.said, seen) for turn, seen in zip(turns, after, strict=True)]
    record = {
        "beginning": truncate([turns[0].observation])[0],
        "explored": step_records(pairs),
        "existing tasks": newest(known),
    }
    form = explored.form
    system = SYNTHESIS.format(most=most, action=form.example, ending=form.ending)
    return system, f"{described}\n\n{as_json(record)}"


def too_long(solution: list[str], form: ActionForm) -> bool:
    """Return True if the actions, with a separator after each, are too long for a task."""
    return sum(len(action) + 1 for action in solution) > _most_chars(form)


def parse_proposals(answer: str, most: int, form: ActionForm) -> list[Proposal]:
    """Parse at most `most` proposals, sorted by descending confidence. Raise ValueError."""
    written = decode_json(answer, list[WrittenProposal])
    if len(written) > most:
        raise ValueError(f"{len(written)} tasks instead of at most {most}")
    proposals = [
        Proposal(one.query, one.confidence, [form.read(action) for action in one.action_sequence])
        for one in written
    ]
    if any(too_long(one.solution, form) for one in proposals):
        raise ValueError(f"a solution of more than {_most_chars(form)} characters")
    return sorted(proposals, key=lambda one: -one.confidence)


def _most_chars(form: ActionForm) -> int:
    return CALLS_CHARS if form.tools else SOLUTION_CHARS
