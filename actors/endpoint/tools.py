"""Tool calls of chat messages, and their text for templates without tools, as Hermes writes
them; pure.

<tool_call>
{"name": "look", "arguments": {"where": "left"}}
</tool_call>
"""

import json
from typing import Any, NamedTuple

from actors.formats.syntaxes import TAGGED, ReadTurn

_INSTRUCTIONS = """# Tools

You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{}
</tools>

For each call return a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


CALL_START, CALL_END = "<tool_call>", "</tool_call>"


class ChatToolCall(NamedTuple):
    """A tool call in a chat message. `arguments` is a JSON object as canonical text.

    The text, not the object, is compared: in Python 1 == 1.0 == True.
    """

    name: str
    arguments: str


class ParsedTurn(NamedTuple):
    """Text and calls of one turn. `readable`: False if one of its calls cannot be parsed."""

    content: str
    calls: tuple[ChatToolCall, ...]
    readable: bool


def canonical(value: Any) -> str:
    """Encode a value as canonical JSON. Raise ValueError if JSON cannot express it."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def parse(text: str) -> ParsedTurn:
    """Parse the calls in a turn, behind its thought, and the text around them.

    If one call cannot be parsed or is not closed, the whole turn is text without calls.
    """
    return parsed(TAGGED.turn(text))


def parsed(read: ReadTurn) -> ParsedTurn:
    """Return a turn as it is compared with what an agent sends."""
    calls = tuple(ChatToolCall(call.name, canonical(call.arguments)) for call in read.calls)
    return ParsedTurn(read.content, calls, read.readable)


def instructions(tools: list[dict[str, Any]]) -> str:
    """Describe tools for the system message of a template that does not support them."""
    return _INSTRUCTIONS.format("\n".join(map(canonical, tools)))


def assistant_text(content: str, calls: tuple[ChatToolCall, ...]) -> str:
    """Write an assistant message as text."""
    parts = [content] if content else []
    for name, arguments in calls:
        body = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


def opened(name: str) -> str:
    """Write the beginning of a call of the tool `name`, of any tool if it is empty."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments":' if name else "<tool_call>\n"


def tool_responses(contents: list[str]) -> str:
    """Write the outputs of tools as the text of a user message."""
    return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in contents)
