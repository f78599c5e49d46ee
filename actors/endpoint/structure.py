"""Structured output: schemas of answers and of calls as grammars; pure.

A grammar is a structural tag of xgrammar, whose JSON schemas may use a part of the standard alone:
what a grammar cannot express is refused, as an answer that breaks its schema is of no use.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from actors.endpoint.request import RequestRefused, Structure, require
from actors.endpoint.tools import CALL_END, CALL_START

ANY_OBJECT: dict[str, Any] = {"type": "object"}
MAX_BLANKS = 1  # between two tokens of JSON: a policy that may write more can be stuck there
_UNSUPPORTED = (
    *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
    "json-pointer",
)
_LOOKAROUND = ("(?=", "(?!", "(?<=", "(?<!")
_SCHEMAS = ("items", "additionalProperties", "unevaluatedProperties", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_CLOSING = "}\n" + CALL_END
Tools = Iterable[tuple[str, dict[str, Any]]]  # names and schemas of arguments


def structure_of(key: str, form: Any, nested: str = "") -> Structure | None:
    """Read an option such as `response_format`; None for plain text. Raise RequestRefused.

    `nested`: the key below which an API has the name and the schema.
    """
    if form is None or form == {"type": "text"}:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        return Structure(key, form, ANY_OBJECT)
    require(kind == "json_schema", f"{key}: {form!r} is not supported")
    holder = form.get(nested) if nested else form
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise RequestRefused(f"{key}: its schema must be an object")
    check(key, schema)
    return Structure(key, form, schema)


def check(key: str, schema: Any) -> None:
    """Raise RequestRefused, naming the place, if a grammar cannot express the schema."""
    try:
        problem = next(_problems(schema, "#"), None)
    except RecursionError:
        problem = "it is nested too deeply"
    if problem:
        raise RequestRefused(f"{key}: schema {problem}"[:500])


def grammar(form: dict[str, Any]) -> str:
    """Encode a format as a grammar."""
    return json.dumps({"type": "structural_tag", "format": form})


def answer(schema: Any) -> dict[str, Any]:
    """Return the format of JSON by a schema."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_BLANKS}


def answer_or_calls(schema: Any, tools: Tools, *, single: bool) -> dict[str, Any]:
    """Return the format of JSON by a schema, or of calls in its place."""
    calls = {"type": "tags_with_separator", "tags": [*_calls(tools)], "separator": "\n"}
    calls |= {"at_least_one": True, "stop_after_first": single}
    return {"type": "or", "elements": [answer(schema), calls]}


def calls_in_text(tools: Tools) -> dict[str, Any]:
    """Return the format of any text, in which calls have these arguments."""
    return {"type": "triggered_tags", "triggers": [CALL_START], "tags": [*_calls(tools)]}


def rest_of_call(schema: Any) -> dict[str, Any]:
    """Return the format of what follows `tools.opened` of a named tool."""
    parts = (_text(" "), answer(schema), _text(_CLOSING))
    return {"type": "sequence", "elements": [*parts]}


def rest_of_calls(tools: list[tuple[str, dict[str, Any]]], *, single: bool) -> dict[str, Any]:
    """Return the format of what follows `tools.opened` of any tool: a call, and, unless `single`,
    more of them."""
    first = {"type": "or", "elements": [*_calls(tools, opened=True)]}
    if single:
        return first
    more = {
        "type": "sequence",
        "elements": [_text("\n"), {"type": "or", "elements": [*_calls(tools)]}],
    }
    return {"type": "sequence", "elements": [first, {"type": "star", "content": more}]}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _calls(tools: Tools, *, opened: bool = False) -> Iterator[dict[str, Any]]:
    for name, schema in tools:
        begin = f'{{"name": {json.dumps(name)}, "arguments": '
        begin = begin if opened else f"{CALL_START}\n{begin}"
        yield {"type": "tag", "begin": begin, "content": answer(schema), "end": _CLOSING}


def _problems(schema: Any, place: str) -> Iterator[str]:
    """Yield what a grammar would ignore."""
    if not isinstance(schema, dict):
        return  # true and false; others are refused by the compiler
    for name in _UNSUPPORTED:
        if name in schema:
            yield f"{place}: {name} is not supported"
    if isinstance(reference := schema.get("$ref"), str) and not reference.startswith("#"):
        yield f"{place}: $ref {reference!r} is not a part of it"
    if len(many := _list(schema.get("allOf"))) > 1:
        yield f"{place}: allOf of {len(many)} schemas is not supported"
    if schema.get("type") == "number" and "multipleOf" in schema:
        yield f"{place}: multipleOf of a number that is not an integer is not supported"
    if (form := schema.get("format")) is not None and form not in _FORMATS:
        yield f"{place}: the format {form!r} is not supported"
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and any(one in pattern for one in _LOOKAROUND):
        yield f"{place}: a pattern that looks ahead or back is not supported"
    if pattern is not None and not {"minLength", "maxLength"}.isdisjoint(schema):
        yield f"{place}: pattern beside minLength or maxLength is not supported"
    for name in _SCHEMAS:
        yield from _problems(schema.get(name), f"{place}/{name}")
    for name in _LISTS:
        for index, part in enumerate(_list(schema.get(name))):
            yield from _problems(part, f"{place}/{name}/{index}")
    for name in _NAMED:
        parts = schema.get(name)
        for key, part in parts.items() if isinstance(parts, dict) else ():
            yield from _problems(part, f"{place}/{name}/{key}")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
