"""Calls as models write them: the endpoint and the format tool_call read the same ones."""

import json
from typing import Any

import pytest

from actors.endpoint.tools import ChatToolCall, ParsedTurn, canonical, parse
from actors.formats import tool_calls
from actors.formats.tool_calls import InvalidCall, ToolCall

READ: list[tuple[str, str, dict[str, Any]]] = [
    ('{"name": "f", "arguments": {"x": 1}}', "f", {"x": 1}),
    ('\n{"arguments":{"x":"é"},"name":"f"}\n', "f", {"x": "é"}),
    ('{"name": "f"}', "f", {}),
    ('{"name": "f", "arguments": null}', "f", {}),
    ('{"name": "f", "arguments": ""}', "f", {}),
    ('{"name": "f", "arguments": "{\\"x\\": [1]}"}', "f", {"x": [1]}),
    ('{"id": "c1", "type": "function", "name": "f", "arguments": {}}', "f", {}),
    (
        '{"name": "f", "arguments": {"x": "a </think> b </think>"}}',
        "f",
        {"x": "a </think> b </think>"},
    ),
]
REFUSED = [
    *("", "{", "[]", '"f"', '{"arguments": {}}', '{"name": ""}', '{"name": 3}', "[" * 100_000),
    *('{"name": "f", "arguments": []}', '{"name": "f", "arguments": "x"}'),
    *('{"name": "f", "arguments": "[]"}', '{"name": "f", "arguments": "null"}'),
    *('{"name": "f", "parameters": {}}', '{"name": "f", "arguments": {"a": NaN}}'),
    *('{"name": "f", "arguments": {"a": 1e999}}', '{"name": "f", "arguments": "{\\"a\\": NaN}"}'),
    *(
        '{"name": "f\\ud800"}',
        '{"name": "f\ud800"}',
        '{"name": "f", "arguments": {"x": "\\ud800"}}',
    ),
    '{"name": "f", "arguments": {"x": ' + "[" * 994 + "]" * 994 + "}}",
]
THOUGHTS = (
    "I think.\n",
    "<think>I should write <tool_call> now.</think>\n",
    "<think>a</think><think><tool_call>{}</tool_call>, <answer>1</answer></think>",
    'one may write <tool_call>{"name": "g"}</tool_call> or <answer>1</think>\n',
    'not <tool_call>{"name": "g"}</tool_call></think> the end </answer>\n',
)


@pytest.mark.parametrize("thought", ("", *THOUGHTS))
@pytest.mark.parametrize(("body", "name", "arguments"), READ)
def test_a_call_is_read(thought: str, body: str, name: str, arguments: dict[str, Any]) -> None:
    text = f"{thought}<tool_call>{body}</tool_call>"
    call = ChatToolCall(name, canonical(arguments))
    assert parse(text) == ParsedTurn(thought.strip(), (call,), True)
    style = ToolCall(think=False, actions_per_turn=2)
    assert style.parse(text) == [tool_calls.canonical(name, arguments)]


@pytest.mark.parametrize("thought", ("", *THOUGHTS))
@pytest.mark.parametrize("body", REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_call_is_refused(thought: str, body: str) -> None:
    text = f"{thought}<tool_call>{body}</tool_call>"
    assert parse(text) == ParsedTurn(text, (), False)
    (refused,) = ToolCall(think=False, actions_per_turn=2).parse(text) or []
    assert isinstance(refused, InvalidCall)


def test_a_thought_holds_no_call() -> None:
    text = f"<think>{json.dumps('<tool_call>')}</think>hello"
    assert parse(text) == ParsedTurn(text, (), True)
    assert ToolCall(think=False, actions_per_turn=2).parse(text) is None


def test_an_answer_may_name_the_end_of_a_thought() -> None:
    (answer,) = ToolCall(think=False, actions_per_turn=1).parse("<answer>a </think></answer>") or []
    assert json.loads(str(answer))["arguments"] == {"text": "a </think>"}
