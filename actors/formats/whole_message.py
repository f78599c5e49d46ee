"""Turn format of the model's own chat, and what of a message is the action."""

import re
from collections.abc import Callable
from functools import partial

from actors.formats.tags import THOUGHT, THOUGHT_END
from actors.formats.tool_calls import InvalidCall, boxed
from evolver_async.extension import implementation

INVALID = "invalid answer\n{}"  # then the last observation again
# Commas between groups of three digits belong to a number. A hyphen behind a word or a bracket does
# not: the last number of `10-5` is 5.
NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-\u2212])?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
)


def last_number(text: str) -> str | None:
    """Return the last number of a text, without commas between its digits; None without one."""
    *_, last = [None, *NUMBER.findall(text)]
    return last and last.replace(",", "").replace("\u2212", "-")


def last_block(text: str, tag: str) -> str | None:
    """Return the content of the last `<tag>…</tag>`; None without one."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, body = before.rpartition(f"<{tag}>")
    return body.strip() if closed and opened else None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {"last_number": last_number, "boxed": boxed}


class WholeMessage:
    """Turn format of the model's own chat: its message is the action, whole, or what `extract`
    takes out of it.

    A thought is not part of the action: everything up to the last `</think>`. `thinks`: the chat
    template has opened it already. A thought without an end, an empty message, and one out of which
    `extract` takes nothing, are format errors. ValueError names the key that does not fit.
    """

    inline = False
    tools = False
    instructions = plain_instructions = ""
    prefix = ""
    stop_strings: tuple[str, ...] = ()
    actions_per_turn = 1
    min_tokens = 1

    def __init__(
        self, *, think: bool, actions_per_turn: int, extract: str = "", thinks: bool = False
    ) -> None:
        other = "where rollout.format is chat: set rollout.format=think_answer"
        if actions_per_turn != 1:
            raise ValueError(f"rollout.actions_per_turn: must be 1, is {actions_per_turn}, {other}")
        if think:
            raise ValueError(f"rollout.think: the model itself decides {other}")
        self._extract = extractor(extract)
        self._thinks = thinks
        before, behind = ("\\boxed{", "}") if extract == "boxed" else ("", "")
        if extract.startswith("<"):
            before, behind = extract, f"</{extract[1:]}"
        self._around = (THOUGHT_END if thinks else "") + before, behind

    def parse(self, text: str) -> list[str | InvalidCall] | None:
        _, ended, message = text.rpartition(THOUGHT_END)
        if not ended and (self._thinks or text.lstrip().startswith(THOUGHT)):
            return None
        action = self._extract(message.strip())
        if not isinstance(action, str | None):  # by a function of the user's
            raise TypeError(f"rollout.extract: returned {type(action).__name__}, no text")
        action = (action or "").strip()
        return [action] if action else None

    def render_actions(self, actions: list[str]) -> str:
        (action,) = actions
        before, behind = self._around
        return f"{before}{action}{behind}"

    def shown(self, outputs: list[str], valid: bool, last: str) -> str:
        seen = outputs[-1] if outputs else last
        return seen if valid else INVALID.format(seen)


def extractor(extract: str) -> Callable[[str], str | None]:
    """Return the function that `rollout.extract` names: of a message, without its thought, to the
    action or None. Raises ValueError for an unfit own one."""
    if not extract:
        return str
    if extract.startswith("<"):
        return partial(last_block, tag=extract[1:-1])
    return implementation("rollout.extract", extract, EXTRACTORS)
