"""Tool calls as text, in the form of Hermes and Qwen; pure.

<tool_call>
{"name": "look", "arguments": {"where": "left"}}
</tool_call>
"""

import json
import re
from typing import Any, NamedTuple

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_OPENING = "<tool_call>"
_INSTRUCTIONS = """# Tools

You may call one or more functions. Their signatures are within <tools></tools>:
<tools>
{}
</tools>

For each call return a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class Call(NamedTuple):
    """One call of a tool; `arguments` is a JSON object in canonical text."""

    name: str
    arguments: str


class Said(NamedTuple):
    """What one turn says. `readable`: whether all calls that it makes can be read."""

    content: str
    calls: tuple[Call, ...]
    readable: bool


def canonical(value: Any) -> str:
    """The one JSON text of a value; ValueError for what JSON does not have."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def parse(text: str) -> Said:
    """The calls in a turn and the text around them.

    Where one of them cannot be read, or has no end, all of the turn is text and nothing is called.
    """
    calls = []
    for body in _CALL.findall(text):
        call = _call(body)
        if call is None:
            return Said(text, (), False)
        calls.append(call)
    content = _CALL.sub("", text)
    if _OPENING in content:
        return Said(text, (), False)
    return Said(content.strip() if calls else text, tuple(calls), True)


def instructions(tools: list[dict[str, Any]]) -> str:
    """What the system message says of tools where the template has no place for them."""
    return _INSTRUCTIONS.format("\n".join(map(canonical, tools)))


def written(content: str, calls: tuple[Call, ...]) -> str:
    """An assistant message as text."""
    parts = [content] if content else []
    for name, arguments in calls:
        body = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


def enclosed(content: str) -> str:
    """What a tool returned, in which nothing ends its place."""
    return content.replace("</tool_response", "</ tool_response")


def answered(contents: list[str]) -> str:
    """What tools returned, as a message of the user."""
    return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in contents)


def _call(body: str) -> Call | None:
    try:
        found = json.loads(body)
        if not isinstance(found, dict):
            return None
        name, arguments = found.get("name"), found.get("arguments")
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        return Call(name, canonical(arguments))
    except (ValueError, RecursionError):
        return None
