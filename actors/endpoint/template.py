"""Messages and tools in the tokens of a chat template, as a conversation's beginning or as more.

A template that writes tools and their calls as `tools.py` reads them does so itself; with any other
they are text in the messages that it knows.
"""

import json
from typing import Any

from actors.endpoint.request import Asked, Message, Refused
from actors.endpoint.tools import Call, answered, enclosed, instructions, parse, written
from actors.formats.chat import ASSISTANT, Chat

_PROBE = Call("probe-name", '{"probe-key": "probe-value"}')
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe-tool",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Template:
    """One tokenizer's way to write what agents say. `native`: it has tools of its own."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.native = self._knows_tools()

    def first(self, asked: Asked) -> list[int]:
        """The tokens of a whole conversation, up to where the policy writes. Raises Refused."""
        tools = [self._plain(tool) for tool in asked.tools]
        messages = self._messages(asked.messages)
        if tools and not self.native:
            described = {"role": "system", "content": instructions(tools)}
            if messages[0]["role"] == "system":
                described["content"] = f"{messages[0]['content']}\n\n{described['content']}"
                messages = messages[1:]
            messages, tools = [described, *messages], []
        return self._chat.tokens_of(self._render(messages, tools))

    def next(self, messages: tuple[Message, ...], ended: bool) -> list[int]:
        """The tokens from the end of the policy's turn to where it writes again. Raises Refused.

        `ended`: the last sampled token was the template's end of a turn, which must not come twice.
        """
        before = [{"role": "user", "content": ""}, {"role": "assistant", "content": ASSISTANT}]
        _, _, after = self._render([*before, *self._messages(messages)], []).partition(ASSISTANT)
        return self._chat.tokens_of(after)[ended:]

    def _messages(self, messages: tuple[Message, ...]) -> list[dict[str, Any]]:
        """The messages in the roles that the template knows."""
        found: list[dict[str, Any]] = []
        responses: list[str] = []  # of consecutive tool messages, which are one message as text
        for role, said, calls in messages:
            content = self._chat.plain(enclosed(said) if role == "tool" else said)
            if role == "tool" and not self.native:
                if not responses:
                    found.append({"role": "user"})
                responses.append(content)
                found[-1]["content"] = answered(responses)
                continue
            responses = []
            message: dict[str, Any] = {"role": role, "content": content}
            if calls and self.native:
                message["tool_calls"] = [
                    {
                        "type": "function",
                        "function": {
                            "name": self._chat.plain(name),
                            "arguments": self._plain(json.loads(arguments)),
                        },
                    }
                    for name, arguments in calls
                ]
            elif calls:
                message["content"] = self._chat.plain(written(said, calls))
            found.append(message)
        return found

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        try:
            return self._chat.render(messages, tools)
        except Exception as error:  # a template raises what its author thought of
            raise Refused(f"messages: the chat template refuses them: {error}") from None

    def _plain(self, value: Any) -> Any:
        """A value in whose texts nothing spells a special token."""
        if isinstance(value, str):
            return self._chat.plain(value)
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        if isinstance(value, dict):
            return {self._plain(name): self._plain(item) for name, item in value.items()}
        return value

    def _knows_tools(self) -> bool:
        """Whether a call can be read back from what the template makes of it, and all is shown."""
        self.native = True
        asked = (Message("user", ""), Message("assistant", "", (_PROBE,)))
        messages = self._messages((*asked, Message("tool", "probe-answer")))
        try:
            text = self._render(messages, [_PROBE_TOOL])
            before = self._render(messages[:2], [])
        except Refused:
            return False
        shown = all(name in text for name in ("probe-tool", "probe-answer"))
        return shown and parse(before[before.find("<tool_call>") :]).calls[:1] == (_PROBE,)
