"""Format of a turn: its prefix, its stop strings, its actions, and the text of their outcome.

A format knows text only. What it costs when a turn cannot be read is the rollout's business. The
formats whose actions are calls of tools are in `tool_calls.py`.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

from actors.formats.tags import THOUGHT_END
from actors.formats.tool_calls import Interleaved, InvalidCall, ToolCall, boxed
from evolver_async.extension import implementation

SEPARATOR = "||"
ANSWER = "<answer> action</answer>"
ANSWERS = f"<answer> action {SEPARATOR} action</answer>"
THOUGHTFUL = ("<think>", "<reason>")  # prefixes behind which a turn has place for a reason
INVALID = "invalid answer\n{}"  # then the last observation again
THOUGHT = "<think>"
# Commas between groups of three digits belong to a number. A hyphen behind a word or a bracket does
# not: the last number of `10-5` is 5.
NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-\u2212])?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
)


@runtime_checkable
class TurnFormat(Protocol):
    """Format of a turn. `prefix` is forced and opens the assistant's turn; the sampled text follows
    it directly.

    `inline`: what is told stands in the policy's own message, which goes on behind it, and not in a
    message of the user. `tools`: actions are calls, and the environment's tools are listed.
    """

    inline: bool
    tools: bool
    instructions: str  # for the system message, in the words of the tiny tokenizer
    plain_instructions: str  # the same in plain English
    prefix: str
    stop_strings: tuple[str, ...]
    actions_per_turn: int
    min_tokens: int  # a turn cannot be shorter, in any tokenizer

    def parse(self, text: str) -> list[str | InvalidCall] | None:
        """Parse the actions of a sampled text, in order; None if none can be read."""
        ...

    def render_actions(self, actions: list[str]) -> str:
        """Write the text that gives these actions, after the prefix."""
        ...

    def shown(self, outputs: list[str], valid: bool, last: str) -> str:
        """Return the text that the policy reads after its turn.

        `outputs`: what every action led to, complaints included; `valid`: the whole turn could be
        read and its actions exist; `last`: what was observed before it.
        """
        ...


class ThinkAnswer:
    """Turn format with `<answer> left</answer>`, after `<think>...</think>` if asked for; `||`
    separates actions. `thinks`: the chat template has opened a thought already, which is not opened
    twice, and is closed where none is asked for.

    A turn with no action, with more than `actions_per_turn`, or with text outside the tags is a
    format error.
    """

    inline = False
    tools = False
    stop_strings: tuple[str, ...] = ("</answer>",)

    def __init__(self, *, think: bool, actions_per_turn: int, thinks: bool = False) -> None:
        self.actions_per_turn = actions_per_turn
        self._begun = THOUGHT if think else "<answer>"
        self.prefix = self._begun
        if thinks:
            self.prefix = "" if think else f"\n{THOUGHT_END}\n\n<answer>"
        self.min_tokens = 2 * actions_per_turn + (2 if think else 0)
        self._opening = "</think><answer>" if think else ""
        thought = r"<think>.*?</think>\s*" if think else ""
        self._pattern = re.compile(thought + r"<answer>([^<>]*)</answer>\s*", re.DOTALL)
        example = ANSWERS if actions_per_turn > 1 else ANSWER
        reason = "<think> why</think>" if think else ""
        limit = f"at most {actions_per_turn} actions " if actions_per_turn > 1 else ""
        self.instructions = f"reply with {limit}{reason}{example}"
        reasoning = "<think>your reasoning</think>" if think else ""
        self.plain_instructions = (
            ("Think step by step before you act. " if think else "")
            + (
                f"Reply with at most {actions_per_turn} actions, which are carried out in order,"
                if actions_per_turn > 1
                else "Reply with exactly one action,"
            )
            + f" in this format and with no other text: {reasoning}{example}"
        )

    def parse(self, text: str) -> list[str | InvalidCall] | None:
        found = self._pattern.fullmatch(self._begun + text)
        if found is None:
            return None
        actions: list[str | InvalidCall] = [part.strip() for part in found[1].split(SEPARATOR)]
        if not all(actions) or len(actions) > self.actions_per_turn:
            return None
        return actions

    def render_actions(self, actions: list[str]) -> str:
        return f"{self._opening} {f' {SEPARATOR} '.join(actions)}</answer>"

    def shown(self, outputs: list[str], valid: bool, last: str) -> str:
        seen = outputs[-1] if outputs else last
        return seen if valid else INVALID.format(seen)


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


PARTS = frozenset((*TurnFormat.__annotations__, "parse", "render_actions", "shown"))
FORMATS = {
    "think_answer": ThinkAnswer,
    "tool_call": ToolCall,
    "interleaved": Interleaved,
    "chat": WholeMessage,
}


def turn_format(
    name: str, *, think: bool, actions_per_turn: int, extract: str = "", thinks: bool = False
) -> TurnFormat:
    """Make the turn format of this name, which is not `auto`. Raises ValueError for an unfit own
    one. `extract` is that of `chat`; `thinks`: the chat template opens a thought."""
    kind = implementation("rollout.format", name, FORMATS)
    if kind is WholeMessage:
        kind = partial(WholeMessage, extract=extract, thinks=thinks)
    elif kind is ThinkAnswer:
        kind = partial(ThinkAnswer, thinks=thinks)
    made = kind(think=think, actions_per_turn=actions_per_turn)
    if not isinstance(made, TurnFormat):
        has = ", ".join(one for one in sorted(PARTS) if not hasattr(made, one))
        raise ValueError(f"rollout.format: {name} made {type(made).__name__} without {has}")
    return made
