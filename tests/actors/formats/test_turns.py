"""The think/answer format: what it accepts, and that it reads what it writes."""

from typing import Any

import pytest
from families import family_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from actors.formats.chat import Chat
from actors.formats.turns import FORMATS, ThinkAnswer, WholeMessage, turn_format

words = st.text("abcdefghij -", min_size=1).map(str.strip).filter(bool)


@given(st.booleans(), st.lists(words, min_size=1, max_size=4))
def test_rendered_actions_are_read_back(think: bool, actions: list[str]) -> None:
    style = ThinkAnswer(think=think, actions_per_turn=4)
    text = style.render_actions(actions)
    assert style.parse(text) == actions
    assert text.endswith(style.stop_strings)


@given(st.text())
def test_any_text_is_one_action_or_a_format_error(text: str) -> None:
    for think in (False, True):
        actions = ThinkAnswer(think=think, actions_per_turn=1).parse(text)
        assert actions is None or (len(actions) == 1 and actions[0] in text)


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        ("left</answer>", ["left"]),
        (" left </answer>\n", ["left"]),
        ("left||up</answer>", ["left", "up"]),
        ("left || up || up</answer>", None),
        ("left ||</answer>", None),
        ("</answer>", None),
        ("left", None),
        ("left</answer> right", None),
        ("<answer>left</answer>", None),
        ("", None),
    ],
)
def test_answers(text: str, actions: list[str] | None) -> None:
    assert ThinkAnswer(think=False, actions_per_turn=2).parse(text) == actions


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        (" a hole\nis near </think><answer> up</answer>", ["up"]),
        ("</think> \n<answer>up</answer>", ["up"]),
        ("<answer>up</answer>", None),
        ("</think> so <answer>up</answer>", None),
    ],
)
def test_thoughts_come_before_the_answer(text: str, actions: list[str] | None) -> None:
    assert ThinkAnswer(think=True, actions_per_turn=1).parse(text) == actions


def test_instructions_show_a_turn_that_parses() -> None:
    for think in (False, True):
        for count in (1, 3):
            style = FORMATS["think_answer"](think=think, actions_per_turn=count)
            for text in (style.instructions, style.plain_instructions):
                _, found, example = text.partition(style.prefix)
                assert found and style.parse(example)


def chat(extract: str = "", thinks: bool = False) -> WholeMessage:
    return WholeMessage(think=False, actions_per_turn=1, extract=extract, thinks=thinks)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (" a < b || c > d \n", "a < b || c > d"),
        ("3 + 7 = 10", "3 + 7 = 10"),
        ("<answer>left</answer>", "<answer>left</answer>"),
        ("<think>so or so</think>\n\nup", "up"),
        ("so or </think> so</think>up", "up"),
        ("<think>it never ends", None),
        ("<think>so</think> ", None),
        (" \n", None),
        ("", None),
    ],
)
def test_a_whole_message_is_the_action_without_its_thought(text: str, action: str | None) -> None:
    assert chat().parse(text) == (None if action is None else [action])


def test_where_the_template_opens_the_thought_a_message_must_close_it() -> None:
    assert chat(thinks=True).parse("I wonder") is None
    assert chat(thinks=True).parse("I wonder</think> up") == chat().parse("up") == ["up"]


@pytest.mark.parametrize(
    ("extract", "text", "action"),
    [
        ("last_number", "72 + 25 = 97.", "97"),
        ("last_number", "<think>12</think>none", None),
        ("last_number", "it is -3", "-3"),
        ("last_number", "it is \u22123.50 m", "-3.50"),
        ("last_number", "10-5", "5"),
        ("last_number", "f(2)-7", "7"),
        ("last_number", "$1,234,567.80!", "1234567.80"),
        ("last_number", "1, 2,345", "2345"),
        ("last_number", "1,23", "23"),
        ("last_number", "about .5", ".5"),
        ("last_number", "6.02e23", "6.02e23"),
        ("last_number", "a b.", None),
        ("boxed", r"so \boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", "1", None),
        ("<answer>", "<answer>1</answer> no: <answer> a < b </answer>.", "a < b"),
        ("<answer>", "<answer>1", None),
        ("<answer>", "<answer> </answer>", None),
        ("<final-answer>", "<final-answer>7</final-answer>", "7"),
        (f"{__name__}:first_word", "up or down", "up"),
        (f"{__name__}:first_word", "nothing", None),
    ],
)
def test_the_action_is_what_extract_takes(extract: str, text: str, action: str | None) -> None:
    assert chat(extract).parse(text) == (None if action is None else [action])


@given(words, st.sampled_from(["", "boxed", "<answer>"]), st.booleans())
def test_actions_of_whole_messages_are_read_back(action: str, extract: str, thinks: bool) -> None:
    style = chat(extract, thinks)
    assert style.parse(style.render_actions([action])) == [action]


@given(st.text("0123456789,.-e ()[]x\u2212"))
def test_a_last_number_is_a_number_of_the_text(text: str) -> None:
    found = chat("last_number").parse(text)
    assert (found is None) == (not any(digit.isdecimal() for digit in text))
    for number in found or []:
        assert float(str(number)) == float(str(number))


def test_what_whole_messages_have_no_place_for_is_refused() -> None:
    for key, changes in (
        ("rollout.think", {"think": True, "actions_per_turn": 1}),
        ("rollout.actions_per_turn", {"think": False, "actions_per_turn": 2}),
    ):
        with pytest.raises(ValueError, match=rf"^{key}: .*rollout\.format=think_answer"):
            turn_format("chat", **changes)
    with pytest.raises(ValueError, match=r"^rollout\.extract: cannot import"):
        chat("nowhere:function")
    with pytest.raises(TypeError, match=r"^rollout\.extract: returned int"):
        chat(f"{__name__}:length").parse("up")


def first_word(text: str) -> str | None:
    return None if text == "nothing" else text.split()[0]


def length(text: str) -> int:
    return len(text)


def test_a_thought_that_the_template_opens_is_not_opened_twice() -> None:
    options: dict[str, Any] = {"actions_per_turn": 1, "chat": Chat(family_tokenizer("qwen3_5"))}
    thoughtful = turn_format("think_answer", think=True, **options)
    assert thoughtful.prefix == ""
    assert thoughtful.parse("\nwhy</think><answer> up</answer>") == ["up"]
    assert thoughtful.parse("<answer> up</answer>") is None
    quick = turn_format("think_answer", think=False, **options)
    assert quick.prefix.lstrip().startswith("</think>") and quick.prefix.endswith("<answer>")
    assert quick.parse(" up</answer>") == ["up"]
    for style in (thoughtful, quick):
        assert style.parse(style.render_actions(["up"])) == ["up"]
