"""How a turn is written: what opens it, where generation stops, how actions are read out of it.

A format knows text only. What it costs when a turn cannot be read is the rollout's business.
"""

import re
from typing import Protocol

SEPARATOR = "||"
ANSWER = "<answer> action</answer>"
ANSWERS = f"<answer> action {SEPARATOR} action</answer>"


class TurnFormat(Protocol):
    """`prefix` is forced and opens the assistant's turn; the sampled text follows it directly."""

    instructions: str  # for the system message
    prefix: str
    stop_strings: tuple[str, ...]
    actions_per_turn: int
    min_tokens: int  # a turn cannot be shorter, in any tokenizer

    def parse(self, text: str) -> list[str] | None:
        """The actions in a sampled text; None is a format error."""
        ...

    def render_actions(self, actions: list[str]) -> str:
        """What a policy that wants these actions would have written after the prefix."""
        ...


class ThinkAnswer:
    """`<answer> left</answer>`, after `<think>...</think>` where asked; `||` separates actions.

    A turn with no action, with more than `actions_per_turn`, or with text outside the tags is a
    format error.
    """

    stop_strings: tuple[str, ...] = ("</answer>",)

    def __init__(self, *, think: bool, actions_per_turn: int) -> None:
        self.actions_per_turn = actions_per_turn
        self.prefix = "<think>" if think else "<answer>"
        self.min_tokens = 2 * actions_per_turn + (2 if think else 0)
        self._opening = "</think><answer>" if think else ""
        thought = r"<think>.*?</think>\s*" if think else ""
        self._pattern = re.compile(thought + r"<answer>([^<>]*)</answer>\s*", re.DOTALL)
        example = ANSWERS if actions_per_turn > 1 else ANSWER
        reason = "<think> why</think>" if think else ""
        limit = f"at most {actions_per_turn} actions " if actions_per_turn > 1 else ""
        self.instructions = f"reply with {limit}{reason}{example}"

    def parse(self, text: str) -> list[str] | None:
        found = self._pattern.fullmatch(self.prefix + text)
        if found is None:
            return None
        actions = [action.strip() for action in found[1].split(SEPARATOR)]
        if not all(actions) or len(actions) > self.actions_per_turn:
            return None
        return actions

    def render_actions(self, actions: list[str]) -> str:
        return f"{self._opening} {f' {SEPARATOR} '.join(actions)}</answer>"


FORMATS = {"think_answer": ThinkAnswer}
