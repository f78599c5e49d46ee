"""Format of a turn: its prefix, its stop strings, its actions, and the text of their outcome.

A format knows text only. Penalties for unreadable turns are up to the rollout. The formats whose
actions are calls of tools are in `tool_calls.py` and `native_turns.py`.
"""

import re
from functools import partial
from typing import Any, Protocol, runtime_checkable

from actors.formats.chat import Chat
from actors.formats.native_turns import NativeTurns
from actors.formats.tags import THOUGHT, THOUGHT_END
from actors.formats.tool_calls import CODE_TOOL, Interleaved, InvalidCall, ToolCall
from actors.formats.whole_message import INVALID, WholeMessage
from evolver_async.extension import implementation

SEPARATOR = "||"
ANSWER = "<answer> action</answer>"
ANSWERS = f"<answer> action {SEPARATOR} action</answer>"
THOUGHTFUL = ("<think>", "<reason>")  # prefixes behind which a turn has place for a reason


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


def callable_tools(style: TurnFormat, specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of an environment's tools that turns of this format can call."""
    if not style.tools:
        return []
    return [one for one in specs if one["name"] == CODE_TOOL] if style.inline else specs


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


PARTS = frozenset((*TurnFormat.__annotations__, "parse", "render_actions", "shown"))
FORMATS = {
    "think_answer": ThinkAnswer,
    "tool_call": ToolCall,
    "interleaved": Interleaved,
    "chat": WholeMessage,
    "native": NativeTurns,
}


def turn_format(
    name: str,
    *,
    think: bool,
    actions_per_turn: int,
    extract: str = "",
    chat: Chat | None = None,
) -> TurnFormat:
    """Make the turn format of this name, which is not `auto`. Raises ValueError for an unfit own
    one. `extract` is that of messages that are answers; `chat`: None where only the shape of turns
    is asked for."""
    kind = implementation("rollout.format", name, FORMATS)
    thinks = chat is not None and chat.opens_thought
    if kind is WholeMessage:
        kind = partial(WholeMessage, extract=extract, thinks=thinks)
    elif kind is NativeTurns:
        kind = partial(NativeTurns, extract=extract, chat=chat)
    elif kind is ThinkAnswer:
        kind = partial(ThinkAnswer, thinks=thinks)
    made = kind(think=think, actions_per_turn=actions_per_turn)
    if not isinstance(made, TurnFormat):
        has = ", ".join(one for one in sorted(PARTS) if not hasattr(made, one))
        raise ValueError(f"rollout.format: {name} made {type(made).__name__} without {has}")
    return made
