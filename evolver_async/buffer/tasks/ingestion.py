"""Conversations with outcomes, from anybody's logs, as rows to learn from.

Files of JSON lines, each for the stage that its name says, all with the provenance of a row
(`source`: file and place; `by`: who wrote it, for a deletion):

    demonstrations.jsonl  conversations that went well                    sft
    labels.jsonl          all, with `label`                               kto
    preferences.jsonl     the best and the worst answer to one prompt     dpo, reward_model
    tasks.jsonl           each prompt once, with its mean outcome         tasks.path
    trajectories.jsonl    those with tokens and log-probs, if any is      rl, with data.weight

Nothing here is on-policy data: an rl stage learns trajectories as what an older policy sampled.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from evolver_async.buffer.tasks import row_files
from evolver_async.buffer.tasks.examples import RowExample, RowMessage, examples_of, is_spoken
from evolver_async.buffer.tasks.logged import LOGGED, is_trajectory, row_of_reply, trajectory_of
from evolver_async.buffer.tasks.rows import ROW_BYTES
from evolver_async.config import ConfigError

OUTCOMES = (  # columns that hold an outcome, where none is named
    *("reward", "score", "label", "resolved", "success", "passed", "feedback", "rating"),
)
GOOD = ("up", "thumbs_up", "good", "positive", "pass", "passed", "resolved", "success", "yes", "👍")
BAD = ("down", "thumbs_down", "bad", "negative", "fail", "failed", "unresolved", "no", "👎")
TRAJECTORIES = "trajectories"
FILES = ("demonstrations", "labels", "preferences", "tasks", TRAJECTORIES)
Runs = Iterable[tuple[str, Callable[[], dict[str, Any]]]]  # place of a trajectory, and its row


@dataclass
class Ingestion:
    """Counts of conversations `read`. `written`: rows by file; `left_out`: conversations by reason,
    and the `last` of each."""

    read: int = 0
    written: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    last: dict[str, str] = field(default_factory=dict)


class _Answer(NamedTuple):
    """An answer to a prompt with its outcome and its provenance."""

    outcome: float
    messages: list[dict[str, Any]]
    facts: dict[str, Any]


@dataclass
class _Answered:
    """Answers to one prompt: how many, the sum of their outcomes, the best and the worst."""

    prompt: list[dict[str, Any]]
    tools: dict[str, Any]
    best: _Answer
    worst: _Answer
    answers: int = 0
    total: float = 0.0


def ingest(
    paths: list[Path],
    out: Path,
    *,
    outcome: str = "",
    threshold: float = 0.5,
    by: str = "",
    columns: dict[str, str] | None = None,
    runs: Runs = (),
) -> Ingestion:
    """Write the rows of files, and trajectories of `runs`, into a new directory, all or nothing.

    `outcome`: the column with a number, a truth value or a word; "": the first of `OUTCOMES` that a
    row has. From `threshold` on a conversation went well. `by`: the column that names who wrote it.
    Raises ConfigError, naming file and row, for an outcome that has no meaning.
    """
    if out.exists():
        raise ConfigError(f"{out}: exists; name a new directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as directory, ExitStack() as on:
        part = Path(directory) / "whole"
        part.mkdir()
        files = {
            name: on.enter_context(open(part / f"{name}.jsonl", "w", encoding="utf-8"))
            for name in FILES
        }
        found, prompts = Ingestion(), dict[str, _Answered]()

        def write(name: str, row: dict[str, Any]) -> None:
            line = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
            if name == TRAJECTORIES and len(line) > ROW_BYTES:  # no stage could read it
                raise ValueError(f"more than {ROW_BYTES} bytes as a row")
            files[name].write(line + "\n")
            found.written[name] += 1

        def leave_out(place: str, error: ValueError) -> None:
            found.left_out[str(error)] += 1
            found.last[str(error)] = place

        for place, load in runs:
            found.read += 1
            try:
                write(TRAJECTORIES, load() | {"source": place})
            except ValueError as error:
                leave_out(place, error)
        for place, row in _rows(paths):
            found.read += 1
            value = _outcome(row, outcome, place)
            facts = {"source": place} | ({"by": row[by]} if row.get(by) is not None else {})
            logged = _logged(row, columns or {}, value)
            try:
                if logged:
                    trajectory_of(logged, {})
                    write(TRAJECTORIES, logged | facts)
                    if not is_spoken(row, columns or {}):
                        continue
                (example,) = examples_of(row, "sft", columns or {})
                prompt, messages = _parts(example)
            except ValueError as error:
                leave_out(place, error)
                continue
            tools = {"tools": example.tools} if example.tools else {}
            if value >= threshold:
                write("demonstrations", {"messages": [*prompt, *messages], **tools, **facts})
            spoken = {"prompt": prompt, "completion": messages, "label": value >= threshold}
            write("labels", {**spoken, "reward": value, **tools, **facts})
            answer = _Answer(value, messages, facts)
            key = json.dumps([prompt, example.tools], sort_keys=True)
            known = prompts.setdefault(key, _Answered(prompt, tools, answer, answer))
            known.answers += 1
            known.total += value
            known.best = max(known.best, answer, key=lambda one: one.outcome)
            known.worst = min(known.worst, answer, key=lambda one: one.outcome)
        _write_prompts(prompts, write)
        for file in files.values():
            file.flush()
        if not found.written[TRAJECTORIES]:
            (part / f"{TRAJECTORIES}.jsonl").unlink()
        part.rename(out)
    return found


def _write_prompts(
    prompts: dict[str, _Answered], write: Callable[[str, dict[str, Any]], None]
) -> None:
    """Write what the answers to each prompt tell together: preferences and tasks."""
    for one in prompts.values():
        if one.best.outcome > one.worst.outcome:
            both = {"chosen": one.best.messages, "rejected": one.worst.messages}
            facts = {"chosen_from": one.best.facts, "rejected_from": one.worst.facts}
            write("preferences", {"prompt": one.prompt, **both, **one.tools, **facts})
        if one.prompt[-1]["role"] == "user":
            known = {"outcome": one.total / one.answers, "answers": one.answers}
            write("tasks", {"prompt": one.prompt, **known, **one.tools, **one.best.facts})


def _rows(paths: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every row with its file and place."""
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: No such file or directory")
        for name in row_files.files_of("FILES", str(path)):
            for part in row_files.parts_of("FILES", Path(name)):
                for number, row, _ in part.records:
                    yield f"{part.name}, {part.word} {number}", row


def _logged(row: dict[str, Any], columns: dict[str, str], reward: float) -> dict[str, Any]:
    """Return the columns of the trajectory that a row holds, {} without one."""
    if not is_trajectory(row, columns):
        found = row_of_reply(row)
        return found and found | {"reward": reward}
    others = ("success", "turn_rewards", "tokenizer")
    named = {name: columns.get(name, name) for name in (*LOGGED, *others)}
    found = {name: row[column] for name, column in named.items() if row.get(column) is not None}
    return found | {"reward": reward}


def _outcome(row: dict[str, Any], column: str, place: str) -> float:
    """Return the outcome of a row as a number."""
    names = (column,) if column else OUTCOMES
    name = next((one for one in names if row.get(one) is not None), "")
    if not name:
        wanted = column or f"one of {', '.join(OUTCOMES)}"
        raise ConfigError(f"{place}: has no outcome, a column {wanted} (--outcome)")
    value = row[name]
    if isinstance(value, bool | int | float):
        return float(value)
    if isinstance(value, str) and value.strip().lower() in (*GOOD, *BAD):
        return float(value.strip().lower() in GOOD)
    known = ", ".join((*GOOD, *BAD))
    raise ConfigError(f"{place}: column {name}: {value!r:.80} is no number and none of {known}")


def _parts(example: RowExample) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages before the assistant's first one that is learnt, and the others."""
    first = next(i for i, one in enumerate(example.messages) if one.learnt)
    if not any(one.role == "user" for one in example.messages[:first]):
        raise ValueError("has no message of the user before the assistant's")
    written = [_message(one) for one in example.messages]
    return written[:first], written[first:]


def _message(message: RowMessage) -> dict[str, Any]:
    """Return a message in OpenAI's form."""
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thought:
        made["reasoning_content"] = message.thought
    if message.calls:
        functions = [{"name": name, "arguments": given} for name, given in message.calls]
        made["tool_calls"] = [{"type": "function", "function": one} for one in functions]
    return made if message.role != "assistant" or message.learnt else made | {"weight": 0}
