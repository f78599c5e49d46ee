"""Syntaxes in which families of models write tool calls, read into content and calls; pure.

`tagged`   <tool_call>…</tool_call>, within it JSON (Hermes, Qwen2.5, Qwen3), <function=…> with
           <parameter=…> (Qwen3-Coder, Qwen3.5) or <arg_key>, <arg_value> (GLM)
`deepseek` <｜tool▁call▁begin｜>…<｜tool▁call▁end｜>: a name, then JSON, fenced in V3 and R1
`kimi`     <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
`mistral`  [TOOL_CALLS] and a list in JSON, or name[ARGS]{…} for each call
`harmony`  <|channel|>commentary to=functions.name <|message|>{…}<|call|> (gpt-oss)
`llama`    the whole message is JSON with `parameters`, behind <|python_tag|> or bare (Llama 3)

Which of them a model was trained on is found by its chat template, see `native.py`. Every search
takes time linear in the length of the text: the policy writes it.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from actors.formats.tags import thought_end

Schemas = Mapping[str, Mapping[str, Any]]  # of each tool's arguments, by name
_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)  # strings of JSON
_CONTROL = re.compile(r"[\x00-\x1f]")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_FENCED = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_NAME = re.compile(r"[A-Za-z_][\w.:/-]*")
_LITERALS = {"True": True, "False": False, "None": None}
_DECODER = json.JSONDecoder(strict=False)


class SyntaxCall(NamedTuple):
    """Name and arguments of a call. `id`: its name in the text; "" where it has none."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


class ReadTurn(NamedTuple):
    """Content and calls of a turn. `readable`: False if it has a call that cannot be read; then
    all of it is content."""

    content: str
    calls: tuple[SyntaxCall, ...]
    readable: bool = True


Found = tuple[str, list[SyntaxCall]]


class Syntax(NamedTuple):
    """A syntax of tool calls. `read`: of the text behind the thought, None without a call,
    ValueError for one that cannot be read. `end`: matches the end of a call whose last argument is
    a text, from within this text."""

    name: str
    read: Callable[[str, Schemas], Found | None]
    end: re.Pattern[str]

    def turn(self, text: str, schemas: Schemas | None = None) -> ReadTurn:
        """Read one sampled turn."""
        start = 0 if self.name == "harmony" else thought_end(text, "tool_call")
        try:
            found = self.read(text[start:], schemas or {})
        except (ValueError, RecursionError):
            return ReadTurn(text, (), False)
        if found is None:
            return ReadTurn(text, ())
        content, calls = found
        return ReadTurn((text[:start] + content).strip(), tuple(calls))


def escaped_controls(text: str) -> str:
    """Escape control characters in the strings of a JSON text: models write raw newlines."""
    return _TEXTS.sub(lambda at: _CONTROL.sub(lambda c: f"\\u{ord(c[0]):04x}", at[0]), text)


def _decoded(text: str) -> Any:
    return _DECODER.decode(text.strip())


def _call(value: Any, key: str = "arguments") -> SyntaxCall:
    """Return the call that an object of JSON is, its arguments under `key`. Raise ValueError."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("no call: it has no name")
    if value.keys() - {"name", key, "id", "type"}:
        raise ValueError(f"no call: it has other keys than name and {key}")
    given = value.get(key)
    number = value.get("id")
    return _made(value["name"], given, number if isinstance(number, str) else "")


def _made(name: str, given: Any, number: str = "") -> SyntaxCall:
    """Return a call with arguments as an object or its text. Raise ValueError."""
    if given is None or given == "":
        given = {}
    elif isinstance(given, str):
        given = _decoded(given)
    if not isinstance(given, dict) or not name:
        raise ValueError("no call: it has no name, or its arguments are no object")
    json.dumps([name, given], ensure_ascii=False, allow_nan=False).encode()  # as it will be sent
    return SyntaxCall(name, given, number)


def _value(text: str, schema: Any) -> Any:
    """Return an argument that is written without quotes, as its schema says: a text where that is
    its type, else JSON or a literal of Python if it is one, else a text."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return _LITERALS[text.strip()] if text.strip() in _LITERALS else _decoded(text)
    except ValueError:
        return text


def _blocks(text: str, begin: str, end: str, around: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the text outside the blocks, without the marks `around` all of them, and their bodies.
    Raise ValueError for a block without an end, and for those marks without a block."""
    outside, bodies, place = list[str](), list[str](), 0
    while (start := text.find(begin, place)) >= 0:
        stop = text.find(end, start)
        if stop < 0:
            raise ValueError(f"{begin} without {end}")
        outside.append(text[place:start])
        bodies.append(text[start + len(begin) : stop])
        place = stop + len(end)
    rest = "".join([*outside, text[place:]])
    for mark in around:
        if mark in rest and not bodies:
            raise ValueError(f"{mark} without a call")
        rest = rest.replace(mark, "")
    return rest, bodies


def _tagged(text: str, schemas: Schemas) -> Found | None:
    if "<tool_call>" not in text and text.lstrip().startswith("<function="):
        text = f"<tool_call>{text.removesuffix('</tool_call>')}</tool_call>"  # often left out
    content, bodies = _blocks(text, "<tool_call>", "</tool_call>", ())
    return (content, [_tagged_call(body, schemas) for body in bodies]) if bodies else None


def _tagged_call(body: str, schemas: Schemas) -> SyntaxCall:
    body = body.strip()
    if body.startswith("{"):
        return _call(_decoded(body))
    if (function := _FUNCTION.fullmatch(body)) is not None:
        return _parameters(function[1].strip(), function[2], schemas)
    name, found, rest = body.partition("<arg_key>")
    if _NAME.fullmatch(name.strip()) is None:
        raise ValueError("no call: neither JSON nor a function")
    name, properties = name.strip(), _properties(schemas, name.strip())
    arguments = {}
    for part in rest.split("<arg_key>") if found else []:
        key, closed, value = part.partition("</arg_key>")
        opened, behind = value.find("<arg_value>"), value.rfind("</arg_value>")
        if not closed or opened < 0 or behind < opened or value[:opened].strip():
            raise ValueError("no call: an argument has no value")
        key, value = key.strip(), value[opened + len("<arg_value>") : behind]
        arguments[key] = _value(value, properties.get(key))
    return _made(name, arguments)


def _parameters(name: str, text: str, schemas: Schemas) -> SyntaxCall:
    """Read <parameter=key>, a line each, value, a line each, </parameter>."""
    properties, arguments = _properties(schemas, name), dict[str, Any]()
    before, *parts = text.split("<parameter=")
    if before.strip():
        raise ValueError("no call: text before its parameters")
    for part in parts:
        key, found, value = part.partition(">")
        value, closed, rest = value.rpartition("</parameter>")
        if not found or not closed or rest.strip():
            raise ValueError("no call: a parameter without an end")
        arguments[key.strip()] = _value(
            value.removeprefix("\n").removesuffix("\n"), properties.get(key.strip())
        )
    return _made(name, arguments)


def _properties(schemas: Schemas, name: str) -> Mapping[str, Any]:
    found = schemas.get(name, {}).get("properties")
    return found if isinstance(found, dict) else {}


def _deepseek(text: str, schemas: Schemas) -> Found | None:
    around = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    content, bodies = _blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", around)
    calls = []
    for body in bodies:
        name, found, given = body.partition("<｜tool▁sep｜>")
        if not found:
            raise ValueError("no call: it has no name")
        if name.strip() == "function" and "```" in given:  # V3 and R1: type, name, fenced JSON
            name, _, given = given.partition("\n")
        fenced = _FENCED.fullmatch(given)
        calls.append(_made(name.strip(), fenced[1] if fenced else given))
    return (content, calls) if calls else None


def _kimi(text: str, schemas: Schemas) -> Found | None:
    around = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    content, bodies = _blocks(text, "<|tool_call_begin|>", "<|tool_call_end|>", around)
    calls = []
    for body in bodies:
        number, found, given = body.partition("<|tool_call_argument_begin|>")
        named = _KIMI_ID.fullmatch(number.strip())
        if not found or named is None:
            raise ValueError("no call: it has no name")
        calls.append(_made(named[1], given, number.strip()))
    return (content, calls) if calls else None


def _mistral(text: str, schemas: Schemas) -> Found | None:
    content, found, rest = text.partition("[TOOL_CALLS]")
    if not found:
        return None
    if rest.lstrip().startswith(("[", "{")):
        value = _decoded(rest.strip())
        calls = [_call(one) for one in (value if isinstance(value, list) else [value])]
        return (content, calls) if calls else None
    calls = []
    for part in rest.split("[TOOL_CALLS]"):
        name, marked, given = part.partition("[ARGS]")
        if not marked:
            place = part.find("{")
            name, given = (part, "") if place < 0 else (part[:place], part[place:])
        name, _, number = name.partition("[CALL_ID]")
        calls.append(_made(name.strip(), given.strip(), number.strip()))
    return content, calls


def _harmony(text: str, schemas: Schemas) -> Found | None:
    """Read messages in channels; a thought is kept in the content as the template's text is."""
    if "<|message|>" not in text and "<|channel|>" not in text:
        return None
    said, calls = list[str](), list[SyntaxCall]()
    for message in text.split("<|start|>"):
        head, found, body = message.partition("<|message|>")
        recipient = _RECIPIENT.search(head)
        if not found and (recipient or _CHANNEL.search(head)):
            raise ValueError("no message: a channel without a text")
        for end in ("<|end|>", "<|call|>", "<|return|>"):
            body = body.partition(end)[0]
        channel = _CHANNEL.search(head)
        if recipient is not None:
            calls.append(_made(recipient[1], body))
        elif channel is None or channel[1] != "analysis":
            said.append(body)
    return "\n".join(one for one in said if one), calls


def _llama(text: str, schemas: Schemas) -> Found | None:
    tag = "<|python_tag|>"
    before, tagged, rest = text.partition(tag)
    if not tagged:
        before, rest = "", text
    rest = rest.strip().removesuffix("<|eom_id|>").strip()
    bare = rest.startswith("{") and '"name"' in rest
    if not tagged and not (bare and ('"parameters"' in rest or '"arguments"' in rest)):
        return None
    calls = []
    while rest:
        value, place = _DECODER.raw_decode(rest)
        other = isinstance(value, dict) and "arguments" in value
        calls.append(_call(value, "arguments" if other else "parameters"))
        rest = rest[place:].lstrip(" \t\r\n;").removeprefix(tag)
    if not calls:
        raise ValueError(f"{tag} without a call")
    return before, calls


_OF_A_TEXT = r'"\s*\}\s*'  # the end of arguments that end with a text
SYNTAXES = (
    Syntax("tagged", _tagged, re.compile(r".*?</tool_call>", re.S)),
    Syntax(
        "deepseek", _deepseek, re.compile(r".*?<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?", re.S)
    ),
    Syntax(
        "kimi", _kimi, re.compile(r".*?<\|tool_call_end\|>(?:<\|tool_calls_section_end\|>)?", re.S)
    ),
    Syntax("mistral", _mistral, re.compile(_OF_A_TEXT + r"(?:,[^\]]*\}\s*\]|\}\s*\])?")),
    Syntax("harmony", _harmony, re.compile(_OF_A_TEXT)),
    Syntax("llama", _llama, re.compile(_OF_A_TEXT + r"\}")),
)
TAGGED = SYNTAXES[0]
