"""Rows of `data` as conversations to learn from: one, or a better and a worse one.

The forms are those of OpenAI's fine-tuning and of TRL, told apart by their columns:

    messages [, tools]                    a conversation; `conversations` of from and value too
    prompt, completion [, tools]          texts, or lists of messages
    [prompt,] chosen, rejected [, tools]  the same with two endings
    text                                  without roles

With `label`, true or false, the first two are examples of what to do or not.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from evolver_async.buffer.tasks.logged import is_trajectory
from evolver_async.config.sections.run import PAIRED
from evolver_async.files import parsed

USUAL = {  # columns by what they hold, if `data.columns` does not name them
    "messages": ("messages", "conversations", "conversation"),
    "completion": ("completion", "response"),
}
ROLES = {  # of a message by those that files write
    **{"system": "system", "developer": "system", "user": "user", "human": "user"},
    **{"assistant": "assistant", "gpt": "assistant", "model": "assistant"},
    **{"tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool"},
}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class RowCall(NamedTuple):
    """A call of a tool. `arguments`: the object."""

    name: str
    arguments: dict[str, Any]


class RowMessage(NamedTuple):
    """One message. `learnt`: it is the assistant's and no part of the prompt."""

    role: str
    content: str
    thought: str = ""
    calls: tuple[RowCall, ...] = ()
    learnt: bool = False


class RowExample(NamedTuple):
    """A conversation to learn from, or a `text` without roles. `reward`: 1 for what to do, 0 for
    what not."""

    messages: list[RowMessage]
    tools: list[dict[str, Any]]
    reward: float = 1.0
    text: str = ""


def is_example(row: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Return True for a row of one of the forms above, or a trajectory of a log, False for a task
    of an environment."""
    return is_trajectory(row, columns) or is_spoken(row, columns)


def is_spoken(row: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Return True for a row of one of the forms above."""
    return any(_column(row, name, columns) for name in ("messages", "completion", "chosen", "text"))


def examples_of(row: Mapping[str, Any], kind: str, columns: Mapping[str, str]) -> list[RowExample]:
    """Return what a row holds for a stage of a `kind`. Raise ValueError, naming the column.

    A dpo or reward_model stage gets the better conversation and the worse one, other stages one.
    """
    if kind == "text" and (column := _column(row, "text", columns)):
        if not isinstance(row[column], str) or not row[column].strip():
            raise ValueError(f"column {column}: must be a text that is not empty")
        return [RowExample([], [], text=row[column])]
    tools = _tools(row, columns)
    if kind in PAIRED:
        sides = [_messages(row, name, columns) for name in ("chosen", "rejected")]
        prompt = _prompt(row, columns)
        if prompt is None:  # both are whole conversations, and begin alike
            better, worse = sides
            pairs = zip(better, worse, strict=False)
            shared = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
            if not shared:
                raise ValueError("chosen and rejected do not begin alike: there is no prompt")
            prompt, sides = better[:shared], [side[shared:] for side in sides]
        return [
            RowExample(_after(prompt, side, name), tools, reward)
            for side, name, reward in zip(sides, ("chosen", "rejected"), (1.0, 0.0), strict=True)
        ]
    reward = 1.0
    if kind == "kto":
        label = row.get(_required(row, "label", columns))
        if label not in (True, False):
            raise ValueError(f"column {columns.get('label', 'label')}: must be true or false")
        reward = float(label)
    if _column(row, "messages", columns):
        messages = _after([], _messages(row, "messages", columns), "messages")
        return [RowExample(messages, tools, reward)]
    completion = _messages(row, "completion", columns)
    prompt = _prompt(row, columns)
    if prompt is None:
        raise ValueError(f"there is no column prompt; the columns are {', '.join(row)}")
    return [RowExample(_after(prompt, completion, "completion"), tools, reward)]


def _column(row: Mapping[str, Any], name: str, columns: Mapping[str, str]) -> str:
    """Return the column that holds something, "" if there is none."""
    names = (columns[name],) if name in columns else USUAL.get(name, (name,))
    return next((one for one in names if row.get(one) is not None), "")


def _required(row: Mapping[str, Any], name: str, columns: Mapping[str, str]) -> str:
    if not (column := _column(row, name, columns)):
        wanted = columns.get(name, name)
        raise ValueError(f"there is no column {wanted}; the columns are {', '.join(row)}")
    return column


def _prompt(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[RowMessage] | None:
    """Return the messages of a prompt, None if the row has none."""
    column = _column(row, "prompt", columns)
    return _messages(row, "prompt", columns, "user") if column else None


def _messages(
    row: Mapping[str, Any], name: str, columns: Mapping[str, str], role: str = "assistant"
) -> list[RowMessage]:
    """Return the messages in a column; a text is one of `role`."""
    column = _required(row, name, columns)
    value = row[column]
    try:
        if isinstance(value, str) and name != "messages":
            if not value.strip():
                raise ValueError("is empty")
            return [RowMessage(role, value, learnt=role == "assistant")]
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list) or not value:
            raise ValueError(f"must be text or a list of messages, is {type(value).__name__}")
        return [message_of(one, number) for number, one in enumerate(value)]
    except ValueError as error:
        raise ValueError(f"column {column}: {error}") from None


def _after(prompt: list[RowMessage], answer: list[RowMessage], name: str) -> list[RowMessage]:
    """Join a prompt, of which nothing is learnt, and an answer."""
    if not any(one.learnt for one in answer):
        raise ValueError(f"column {name}: has no message of the assistant to learn")
    return [one._replace(learnt=False) for one in prompt] + answer


def message_of(value: Any, number: int) -> RowMessage:
    """Read one message. Raise ValueError, which names it."""
    if not isinstance(value, dict):
        raise ValueError(f"message {number}: must be an object")
    given = value.get("role", value.get("from"))
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise ValueError(f"message {number}: role must be one of {', '.join(ROLES)}, is {given!r}")
    content = value.get("content", value.get("value"))
    calls = tuple(_call(one, number) for one in value.get("tool_calls") or ())
    if content is None and calls:
        content = ""
    if isinstance(content, list):  # parts, as OpenAI's API has them
        parts = [one.get("text") if isinstance(one, dict) else None for one in content]
        if not all(isinstance(one, str) for one in parts):
            raise ValueError(f"message {number}: content must be text alone")
        content = "".join(one for one in parts if isinstance(one, str))
    if not isinstance(content, str):
        raise ValueError(f"message {number}: content must be text")
    if role != "assistant" and calls:
        raise ValueError(f"message {number}: tool_calls belong to the assistant")
    thoughts = (value.get(name) for name in THOUGHTS)
    thought = next((one for one in thoughts if isinstance(one, str)), "")
    learnt = role == "assistant" and value.get("weight", 1) != 0
    return RowMessage(role, content, thought.strip(), calls, learnt)


def _call(value: Any, number: int) -> RowCall:
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not isinstance(function, dict):
        raise ValueError(f"message {number}: a call in tool_calls has no name")
    arguments = function.get("arguments")
    try:
        read = parsed(arguments or "{}") if not isinstance(arguments, dict) else arguments
    except (TypeError, ValueError):
        read = None
    if not isinstance(read, dict):
        raise ValueError(f"message {number}: arguments of {name} must be an object, or one as JSON")
    return RowCall(name, _given(read))


def _tools(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the specs of the tools of a row, which may be JSON as text."""
    column = _column(row, "tools", columns)
    if not column:
        return []
    value = row[column]
    try:
        found = parsed(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"column {column}: is no JSON: {error}") from None
    specs = [one.get("function", one) if isinstance(one, dict) else None for one in found or []]
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in specs):
        raise ValueError(f"column {column}: must be a list of functions with names")
    return [{"type": "function", "function": _given(one)} for one in specs]


def _given(value: Any) -> Any:
    """Return a value without the keys that are null: a table gives every row the keys of all."""
    if isinstance(value, dict):
        return {name: _given(one) for name, one in value.items() if one is not None}
    return [_given(one) for one in value] if isinstance(value, list) else value
