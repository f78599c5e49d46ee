"""Tagged blocks: what they hold, and that text without their ends costs no more than its length."""

import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.endpoint.tools import parse
from actors.formats.tags import blocks
from actors.formats.tool_calls import Interleaved, ToolCall, canonical
from actors.formats.turns import ThinkAnswer

OPENINGS = 32_768
SOON_S = 2.0

pieces = st.sampled_from(("<a>", "</a>", "<b>", "</b>", "x", "\n", "{", "}", "<", ">"))


def slow_blocks(text: str) -> list[tuple[str, str, bool]]:
    """The oracle: the expression that finds the blocks in quadratic time."""
    pattern = re.compile(r"<a>(?P<a>.*?)(?P<end></a>|\Z)|<b>(?P<b>.*?)</b>", re.DOTALL)
    return [
        ("b", found["b"], True) if found["a"] is None else ("a", found["a"], found["end"] == "</a>")
        for found in pattern.finditer(text)
    ]


@given(st.lists(pieces).map("".join))
def test_blocks_are_those_of_the_slow_expression(text: str) -> None:
    """An unclosed <a> reaches to the end, an unclosed <b> is text."""
    seen = []
    for block in blocks(text, "a", "b"):
        if block.closed or block.tag == "a":
            seen.append((block.tag, block.body, block.closed))
        if not block.closed and block.tag == "a":
            break
    assert seen == slow_blocks(text)


@given(st.lists(pieces).map("".join))
def test_a_block_stands_where_it_says(text: str) -> None:
    for block in blocks(text, "a", "b"):
        closing = f"</{block.tag}>" if block.closed else ""
        assert text[block.start : block.end] == f"<{block.tag}>{block.body}{closing}"


PARSERS: dict[str, Callable[[str], object]] = {
    "endpoint": parse,
    "tool_call": ToolCall(think=False, actions_per_turn=1).parse,
    "several tool calls": ToolCall(think=False, actions_per_turn=OPENINGS).parse,
    "interleaved": Interleaved(think=False, actions_per_turn=1).parse,
    "think_answer": ThinkAnswer(think=True, actions_per_turn=1).parse,
}
REPEATED = (
    *("<tool_call>\n", "<answer>\n", "<answer>x", "<code>\n", "<think>", "</think>", "</code>"),
    *("<tool_call></tool_call><answer>", "</think><answer>x", "</think> ", "</answer>", "```\n"),
)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("repeated", REPEATED)
def test_unclosed_openings_are_read_in_linear_time(parser: str, repeated: str) -> None:
    text = repeated * OPENINGS
    began = time.thread_time()
    PARSERS[parser](text)
    assert time.thread_time() - began < SOON_S


@pytest.mark.parametrize("repeated", ["\\boxed{", "\\boxed{}", "{", "}"])
def test_unclosed_boxes_are_read_in_linear_time(repeated: str) -> None:
    style = Interleaved(think=False, actions_per_turn=1)
    began = time.thread_time()
    style.parse(f"<answer>{repeated * OPENINGS}</answer>")
    assert time.thread_time() - began < SOON_S


def slow_box(text: str) -> str | None:
    """The oracle: tries the boxes from the last to the first, each up to its end."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth, inside = 1, start + len("\\boxed{")
        for place in range(inside, len(text)):
            depth += (text[place] == "{") - (text[place] == "}")
            if depth == 0:
                return text[inside:place]
        start = text.rfind("\\boxed{", 0, start)
    return None


@given(st.lists(st.sampled_from(("\\boxed{", "{", "}", "x", "\\boxed"))).map("".join))
def test_the_box_is_the_last_one_that_closes(text: str) -> None:
    read = Interleaved(think=False, actions_per_turn=1).parse(f"<answer>{text}</answer>")
    box = slow_box(text)
    wanted = (text if box is None else box).strip()
    assert read == ([canonical("answer", {"text": wanted})] if wanted else None)


slow_code = re.compile(
    r".*?(?:<code>(?P<code>.*?)</code>|<answer>(?P<answer>.*?)</answer>)\s*", re.DOTALL
)
written = st.sampled_from(("<code>", "</code>", "<answer>", "</answer>", "x", "\n", " "))


@given(st.lists(written).map("".join))
def test_interleaved_reads_what_the_slow_expression_finds(text: str) -> None:
    read = Interleaved(think=False, actions_per_turn=1).parse(text)
    found = slow_code.fullmatch(text)
    if found is None:
        assert read is None
    elif found["answer"] is None:
        code = found["code"].strip("\r\n")
        assert read == ([canonical("python", {"code": code})] if code.strip() else None)
    else:
        answer = found["answer"].strip()
        assert read == ([canonical("answer", {"text": answer})] if answer else None)
