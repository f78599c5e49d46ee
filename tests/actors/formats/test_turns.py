"""The think/answer format: what it accepts, and that it reads what it writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.formats.turns import FORMATS, ThinkAnswer

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
