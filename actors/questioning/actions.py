"""Actions in the answers of a language model: texts, or calls of tools as objects.

A call is kept as the text that environments take (`actors/formats/tool_calls.py`), so that code and
arguments may hold anything: line breaks, `||`, tags.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from actors.formats.tool_calls import (
    ANSWER_TOOL,
    WrittenCall,
    called,
    canonical,
    with_arguments,
)
from actors.llm.json_client import as_json

WrittenAction = str | WrittenCall  # as it stands in an answer
TEXT = '"..."'
CALL = '{"name": "...", "arguments": {...}}'
ANSWER = f'{{"name": "{ANSWER_TOOL}", "arguments": {{"text": "..."}}}}'


class ActionForm(NamedTuple):
    """Form of an environment's actions. `tools`: specs of those that can be called; without any,
    actions are texts."""

    tools: Sequence[dict[str, Any]] = ()

    @property
    def example(self) -> str:
        """An action as an answer has it."""
        return CALL if self.tools else TEXT

    @property
    def ending(self) -> str:
        """Sentence about the action that gives an answer; "" where no action does."""
        return f" An answer to the task is the last call: {ANSWER}." if self.tools else ""

    def with_tools(self, described: str) -> str:
        """Append the tools to the description of an environment."""
        return f"{described}\n\nTools:\n{as_json(list(self.tools))}" if self.tools else described

    def read(self, written: WrittenAction) -> str:
        """Return an action as the environment takes it. Raise ValueError if it is of another form;
        a call of a tool that does not exist is read, too."""
        if not self.tools:
            if isinstance(written, str):
                return written.strip()
            raise ValueError("an action is a text here, not an object")
        try:
            call = called(written) if isinstance(written, str) else with_arguments(written)
            return canonical(call.name, call.arguments)
        except RecursionError:
            raise ValueError("a call is nested too deeply") from None

    def check_tool(self, action: str) -> None:
        """Raise ValueError for a call of a tool that does not exist."""
        known = [spec["name"] for spec in self.tools]
        if known and (name := called(action).name) not in known:
            raise ValueError(f"no tool {name!r} (known: {', '.join(known)})")


class Surroundings(NamedTuple):
    """Environment as an episode meets it. `instructions`: in plain English, after `reset`;
    `beginning`: what the agent is told first."""

    env: str
    instructions: str
    form: ActionForm
    beginning: str
