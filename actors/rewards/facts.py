"""Facts of a finished episode, as the terms of the reward read them."""

from dataclasses import dataclass
from typing import Any

import msgspec

from actors.formats.tool_calls import ANSWER_TOOL, called
from actors.rollout.finished import Finished
from evolver_async.schema import Role, Task, Trajectory, TurnFlag
from evolver_async.wire.transcripts import Turn

Message = dict[str, Any]
THOUGHTS_END = "</think>"


class Unscorable(ValueError):
    """Failure of a term: it raised, was late, or returned no finite number."""


@dataclass(frozen=True)
class EpisodeFacts:
    """One finished episode.

    `prompt`: the messages before the policy's first; `completion`: the policy's messages, and
    between them what the environment said. `text`: the policy's last message; `reply`: the answer
    in it, "" if it could not be read. `answer`: the task's, None if it has none. `env_reward`,
    `success`: the environment's own, without penalties.
    """

    task: Task
    trajectory: Trajectory
    prompt: list[Message]
    completion: list[Message]
    turns: list[Turn]
    text: str
    reply: str
    answer: Any
    env_reward: float
    success: bool

    def needed_answer(self) -> str | None:
        """Return the answer as text; None if this task has none."""
        return None if self.answer is None else str(self.answer)

    def arguments(self) -> dict[str, list[Any]]:
        """Return the arguments of an own function by name, each a list with one entry.

        A column of the row comes before a fact of the same name, but never before the three that
        TRL passes itself.
        """
        one, task = self.trajectory, self.task
        actions = [s.tokens[s.roles == Role.ACTION].tolist() for s in one.sequences]
        facts = {
            "answer": self.answer,
            "reference": task.reference,
            "task": msgspec.to_builtins(task, str_keys=True),
            "env_reward": self.env_reward,
            "success": self.success,
            "terminated": one.terminated,
            "transcript": [msgspec.to_builtins(turn) for turn in self.turns],
            "tool_calls": calls(one),
            "tokens": one.action_tokens,
            "seconds": one.timing.get("total_s", 0.0),
            "metrics": dict(one.metrics),
        }
        trl = {
            "prompts": self.prompt,
            "completions": self.completion,
            "completion_ids": [token for tokens in actions for token in tokens],
        }
        columns = {name: value for name, value in task.row.items() if name not in TRL_DROPS}
        return {name: [value] for name, value in (facts | columns | trl).items()}


TRL_DROPS = ("prompt", "completion", "completion_ids")  # columns that TRL does not pass on
KNOWN = (  # names of `arguments` beside the columns
    *("answer", "reference", "task", "env_reward", "success", "terminated", "transcript"),
    *("tool_calls", "tokens", "seconds", "metrics", "prompts", "completions", "completion_ids"),
)
GIVEN = ("trainer_state", "log_metric")  # further names, made where the function runs


def facts_of(task: Task, finished: Finished, answer_column: str, env_reward: float) -> EpisodeFacts:
    """Return the facts of a finished episode, whose texts were recorded."""
    trajectory, turns = finished.trajectory, finished.transcript.turns
    prompt: list[Message] = list(task.prompt) or [{"role": "user", "content": finished.query}]
    completion: list[Message] = []
    for number, turn in enumerate(turns):
        if number:
            completion.append({"role": "user", "content": turn.observation})
        completion.append({"role": "assistant", "content": turn.text})
    unread = bool(len(turns)) and bool(trajectory.turn_flags[-1] & TurnFlag.FORMAT_ERROR)
    return EpisodeFacts(
        task=task,
        trajectory=trajectory,
        prompt=prompt,
        completion=completion,
        turns=turns,
        text=turns[-1].text if turns else "",
        reply="" if unread or not turns else _reply(turns[-1]),
        answer=answer_of(task, answer_column),
        env_reward=env_reward,
        success=trajectory.success,
    )


def answer_of(task: Task, column: str) -> Any:
    """Return the task's answer: its column of the row, else its reference; None without either."""
    if column in task.row:
        return task.row[column]
    return task.reference[-1] if task.reference else None


def calls(trajectory: Trajectory) -> int:
    """Count the turns that called a tool."""
    return int(((trajectory.turn_flags & TurnFlag.TOOL_CALL) != 0).sum())


def _reply(turn: Turn) -> str:
    """Return the answer in a turn: its action, of a call of the answer tool its text."""
    said = turn.said if turn.action == "" else turn.action
    if said.lstrip().startswith("{"):
        try:
            call = called(said)
        except ValueError:
            return said
        text = call.arguments.get("text")
        if call.name == ANSWER_TOOL and isinstance(text, str):
            return text
    return said.rpartition(THOUGHTS_END)[2]
