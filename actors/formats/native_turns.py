"""Turn format in which tools are listed, called and answered as the policy's own chat template
writes them; a message without a call is the answer."""

from collections.abc import Iterable
from copy import copy
from typing import Any, Self

from actors.formats.chat import Chat
from actors.formats.native import Native, schemas
from actors.formats.syntaxes import SyntaxCall
from actors.formats.tags import THOUGHT_END, escaped_response
from actors.formats.tool_calls import ANSWER_TOOL, InvalidCall, called, canonical
from actors.formats.whole_message import WholeMessage

UNREADABLE = "error: the tool call could not be read"
NO_ANSWER = "error: neither a tool call nor an answer could be read"


class NativeTurns:
    """Turn format of a model that was trained to call tools.

    `listed` makes the format of one episode, which knows the episode's tools and its last calls.
    `chat`: None where only the shape of turns is asked for. ValueError names the key that does not
    fit, also for a template that lists no tools or writes calls in an unknown syntax.
    """

    inline = False
    tools = True
    prefix = ""
    stop_strings: tuple[str, ...] = ()
    min_tokens = 1
    instructions = "call tools where they help ; at last reply without a call"
    plain_instructions = (
        "Call the tools where they help. When you know the answer, reply with it and call no tool."
    )

    def __init__(
        self, *, think: bool, actions_per_turn: int, extract: str, chat: Chat | None
    ) -> None:
        if think:
            raise ValueError("rollout.think: the model itself decides where rollout.format=native")
        self.actions_per_turn = actions_per_turn
        self.specs: tuple[dict[str, Any], ...] = ()
        self._thinks = chat is not None and chat.opens_thought
        self._answer = WholeMessage(
            think=False, actions_per_turn=1, extract=extract, thinks=self._thinks
        )
        self._chat, self._native = chat, None if chat is None else Native(chat)
        self._calls: tuple[SyntaxCall, ...] = ()
        self._number = 0  # of calls in the conversation so far
        if self._native is not None and self._native.syntax is None:
            problem = "the chat template lists no tools, or writes calls in an unknown syntax"
            raise ValueError(f"rollout.format: native: {problem}; set rollout.format=tool_call")

    def listed(self, specs: Iterable[dict[str, Any]]) -> Self:
        """Return the format of one episode with these tools, specs of functions."""
        one = copy(self)
        assert self._chat is not None, "no template"
        one.specs = tuple(
            {"type": "function", "function": self._chat.plain_value(spec)} for spec in specs
        )
        return one

    def parse(self, text: str) -> list[str | InvalidCall] | None:
        assert self._native is not None and self._native.syntax is not None, "no template"
        read = self._native.syntax.turn(text, schemas(self.specs))
        self._calls = read.calls
        if not read.readable:
            return [InvalidCall(UNREADABLE)]
        if not read.calls:
            found = self._answer.parse(read.content)
            return found and [canonical(ANSWER_TOOL, {"text": one}) for one in found]
        return [self._action(place, call) for place, call in enumerate(read.calls)]

    def render_actions(self, actions: list[str]) -> str:
        assert self._native is not None, "no template"
        calls = [called(action) for action in actions]
        if [call.name for call in calls] == [ANSWER_TOOL]:
            return self._answer.render_actions([calls[0].arguments["text"]])
        written = self._native.written([SyntaxCall(one.name, one.arguments) for one in calls])
        return f"{THOUGHT_END}\n\n{written}" if self._thinks else written

    def shown(self, outputs: list[str], valid: bool, last: str) -> str:
        """Render what stands between the turn that was read last and the next one."""
        assert self._native is not None and self._chat is not None, "no template"
        if not self._calls:
            said = self._chat.plain(outputs[-1] if outputs else NO_ANSWER)
            return self._native.after([], [{"role": "user", "content": said}])
        first, self._number = self._number, self._number + len(self._calls)
        results = [
            self._native.result(self._chat.plain(escaped_response(said)), call, number)
            for number, (call, said) in enumerate(zip(self._calls, outputs, strict=True), first)
        ]
        return self._native.after(self._calls, results)

    def _action(self, place: int, call: SyntaxCall) -> str | InvalidCall:
        if place >= self.actions_per_turn:
            return InvalidCall(f"error: at most {self.actions_per_turn} calls in one turn")
        if call.name == ANSWER_TOOL:
            return InvalidCall("error: an answer is a message without a call")
        return canonical(call.name, call.arguments)
