"""Tool calls as models write them, and what is none or cannot be read."""

import json

import pytest

from actors.formats.syntaxes import SYNTAXES, SyntaxCall
from actors.formats.tool_calls import called

BY_NAME = {syntax.name: syntax for syntax in SYNTAXES}
SCHEMAS = {"look": {"properties": {"where": {"type": "string"}, "steps": {"type": "integer"}}}}
LOOK = ("look", {"where": "2", "steps": 3})
OBJECT = '{"where": "2", "steps": 3}'
WRITTEN = [
    ("tagged", f'<tool_call>\n{{"name": "look", "arguments": {OBJECT}}}\n</tool_call>'),
    ("tagged", f'<tool_call>{{"arguments": {json.dumps(OBJECT)}, "name": "look"}}</tool_call>'),
    (
        "tagged",
        "<tool_call>\n<function=look>\n<parameter=where>\n2\n</parameter>\n<parameter=steps>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    (  # Qwen3-Coder often leaves the opening tag out
        "tagged",
        "<function=look>\n<parameter=where>\n2\n</parameter>\n<parameter=steps>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    (
        "tagged",
        "<tool_call>look\n<arg_key>where</arg_key>\n<arg_value>2</arg_value>\n"
        "<arg_key>steps</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    ),
    ("llama", f'{{"name": "look", "parameters": {OBJECT}}}'),
    ("llama", f'<|python_tag|>{{"name": "look", "parameters": {OBJECT}}}'),
    ("mistral", f'[TOOL_CALLS] [{{"name": "look", "arguments": {OBJECT}, "id": "a1B2c3D4e"}}]'),
    ("mistral", f"[TOOL_CALLS]look[ARGS]{OBJECT}"),
    ("mistral", f"[TOOL_CALLS]look[CALL_ID]a1B2c3D4e[ARGS]{OBJECT}"),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{OBJECT}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        f"{OBJECT}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        f"<|tool_call_argument_begin|>{OBJECT}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>I wonder.<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.look <|constrain|>json<|message|>{OBJECT}",
    ),
    ("harmony", f" to=functions.look<|channel|>commentary json<|message|>{OBJECT}<|call|>"),
]


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_a_call_is_read_as_its_model_writes_it(name: str, text: str) -> None:
    read = BY_NAME[name].turn(text, SCHEMAS)
    assert [call[:2] for call in read.calls] == [LOOK]
    assert read.readable and read.content == ""
    others = {"llama": "{", "harmony": "<|message|>"}
    if name not in others:  # cut off by max_tokens
        cut = BY_NAME[name].turn(text[: len(text) * 2 // 3], SCHEMAS)
        assert (cut.calls, cut.readable) == ((), False)


@pytest.mark.parametrize(
    ("name", "ids"), [("mistral", ("a1B2c3D4e", "b")), ("kimi", ("functions.look:0", "look:1"))]
)
def test_several_calls_keep_the_names_that_the_model_gave_them(name: str, ids: object) -> None:
    written = {
        "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {}, "id": "a1B2c3D4e"},'
        ' {"name": "look", "arguments": {}, "id": "b"}]',
        "kimi": "".join(
            f"<|tool_call_begin|>{one}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
            for one in ("functions.look:0", "look:1")
        ),
    }
    calls = BY_NAME[name].turn(f"So.{written[name]}").calls
    assert tuple(call.id for call in calls) == ids and {call.name for call in calls} == {"look"}


UNREADABLE = [
    ("tagged", "<tool_call>{look left}</tool_call>"),
    ("tagged", "<tool_call><function=look><parameter=where>2</function></tool_call>"),
    ("tagged", "<tool_call>look\n<arg_key>where</arg_key></tool_call>"),
    ("tagged", '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'),
    ("tagged", '<tool_call>{"name": "look", "arguments": {"a": NaN}}</tool_call>'),
    ("tagged", '<tool_call>{"name": "look", "arguments": {"a": "\\ud800"}}</tool_call>'),
    ("llama", "<|python_tag|>print(1)"),
    ("llama", '{"name": "look", "parameters": {"where": '),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS][{]"),
    ("deepseek", "<｜tool▁calls▁begin｜>look"),
    ("kimi", "<|tool_call_begin|>functions.look:0<|tool_call_end|>"),
    ("harmony", "<|channel|>commentary to=functions.look<|message|>{"),
    ("harmony", "<|channel|>commentary to=functions.look"),
    ("tagged", "<tool_call>" + '{"a":' * 100_000 + "</tool_call>"),
]


@pytest.mark.parametrize(("name", "text"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_call_that_cannot_be_read_is_told_from_text(name: str, text: str) -> None:
    assert BY_NAME[name].turn(text) == (text, (), False)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(
    "text", ["", "It is up.", '{"name": "Ann", "age": 3}', "<think>a</think>b"]
)
def test_text_is_no_call(name: str, text: str) -> None:
    assert BY_NAME[name].turn(text) == (text, (), True)


def test_of_harmony_the_agent_gets_what_was_said_not_thought() -> None:
    text = (
        "<|channel|>analysis<|message|>Up?<|end|><|start|>assistant<|channel|>final<|message|>Up."
    )
    assert BY_NAME["harmony"].turn(text) == ("Up.", (), True)


def test_a_call_within_a_thought_does_not_count() -> None:
    call = '<tool_call>{"name": "look"}</tool_call>'
    read = BY_NAME["tagged"].turn(f"<think>or {call}</think>{call}")
    assert read.calls == (SyntaxCall("look", {}),) and read.content == f"<think>or {call}</think>"


def test_texts_in_json_may_have_raw_newlines() -> None:
    text = '{"name": "run", "arguments": {"code": "a = 1\n\tb = \\"\\n\\""}}'
    arguments = {"code": 'a = 1\n\tb = "\n"'}
    assert called(text) == ("run", arguments) or called(text).arguments == arguments
    assert BY_NAME["tagged"].turn(f"<tool_call>{text}</tool_call>").calls[0].arguments == arguments
    assert called('{"name": "run",\n "arguments": {}}').name == "run"
    with pytest.raises(ValueError, match="JSON"):
        called('{"name": "run", "arguments": {"code": "\n}}')


@pytest.mark.parametrize("name", BY_NAME)
def test_reading_takes_time_linear_in_the_text(name: str) -> None:
    """Openings without an end, of every syntax: quadratic, this would take minutes."""
    marks = (
        "<tool_call>",
        "<function=",
        "<parameter=",
        "<arg_key>",
        '{"',
        "[TOOL_CALLS]",
        "<|start|>",
    )
    marks += "<｜tool▁call▁begin｜>", "<|tool_call_begin|>", "<think>", "<|message|>", "<|channel|>"
    for mark in marks:
        BY_NAME[name].turn(mark * 30_000)
        BY_NAME[name].turn(f"<tool_call>{mark * 30_000}</tool_call>")
    with pytest.raises(ValueError, match="JSON"):
        called('"\\"' * 30_000)
