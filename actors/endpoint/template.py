"""Rendering of messages and tools with a chat template, as whole conversations or continuations.

A template that writes tool calls in the form that `tools.py` reads is used as it is. For any other
template, tools and calls are written as text into the messages that it supports.
"""

import json
from typing import Any

from actors.endpoint import tools as texts
from actors.endpoint.request import ChatMessage, ChatRequest, RequestRefused
from actors.formats.chat import ASSISTANT, Chat

_PROBE = texts.ChatToolCall("probe-name", '{"probe-key": "probe-value"}')
_NONE = {"type": "object", "properties": {}}
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe-tool", "description": "", "parameters": _NONE},
}


class Template:
    """Chat template of one tokenizer. `native`: True if it supports tools itself."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.native = self._supports_tools()

    def first(self, request: ChatRequest) -> list[int]:
        """Render a whole conversation up to the policy's turn. Raise RequestRefused."""
        tools = [self._plain(tool) for tool in request.tools]
        messages = self._messages(request.messages)
        if tools and not self.native:
            described = {"role": "system", "content": texts.instructions(tools)}
            if messages[0]["role"] == "system":
                described["content"] = f"{messages[0]['content']}\n\n{described['content']}"
                messages = messages[1:]
            messages, tools = [described, *messages], []
        return self._chat.tokens_of(self._render(messages, tools))

    def next(self, messages: tuple[ChatMessage, ...], last: int) -> list[int]:
        """Render the tokens between the policy's turn, whose last token is `last`, and its next.

        Raise RequestRefused.
        """
        before = [{"role": "user", "content": ""}, {"role": "assistant", "content": ASSISTANT}]
        _, _, after = self._render([*before, *self._messages(messages)], []).partition(ASSISTANT)
        return self._chat.behind(last, self._chat.tokens_of(after))

    def tokens_of(self, text: str) -> list[int]:
        return self._chat.tokens_of(text)

    def given(self, request: ChatRequest) -> str:
        """Return the beginning of the policy's turn that it does not write: the client's prefill,
        and the opening of a call that it must make. A call follows no thought, so one that the
        template opens is closed."""
        if request.forced is None:
            return self._chat.plain(request.prefill)
        thinks = self._chat.opening.rstrip().endswith("<think>") and not request.prefill
        begun = "\n</think>\n\n" if thinks else self._chat.plain(request.prefill)
        return begun + texts.opened(self._chat.plain(request.forced))

    def _messages(self, messages: tuple[ChatMessage, ...]) -> list[dict[str, Any]]:
        """Convert messages to the roles that the template supports."""
        found: list[dict[str, Any]] = []
        responses: list[str] = []  # of consecutive tool messages, which are one message as text
        for role, text, calls in messages:
            content = self._chat.plain(texts.escaped(text) if role == "tool" else text)
            if role == "tool" and not self.native:
                if not responses:
                    found.append({"role": "user"})
                responses.append(content)
                found[-1]["content"] = texts.tool_responses(responses)
                continue
            responses = []
            message: dict[str, Any] = {"role": role, "content": content}
            if calls and self.native:
                message["tool_calls"] = [self._native(*call) for call in calls]
            elif calls:
                message["content"] = self._chat.plain(texts.assistant_text(text, calls))
            found.append(message)
        return found

    def _native(self, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": self._chat.plain(name), "arguments": self._plain(json.loads(arguments))}
        return {"type": "function", "function": function}

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        try:
            return self._chat.render(messages, tools)
        except Exception as error:  # templates raise exceptions of any kind
            raise RequestRefused(f"messages: the chat template rejects them: {error}") from None

    def _plain(self, value: Any) -> Any:
        """Escape special tokens in all texts of a value."""
        if isinstance(value, str):
            return self._chat.plain(value)
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        if isinstance(value, dict):
            return {self._plain(name): self._plain(item) for name, item in value.items()}
        return value

    def _supports_tools(self) -> bool:
        """Return True if the template renders tools, and calls in the form that `parse` reads."""
        self.native = True
        request = (ChatMessage("user", ""), ChatMessage("assistant", "", (_PROBE,)))
        messages = self._messages((*request, ChatMessage("tool", "probe-answer")))
        try:
            text = self._render(messages, [_PROBE_TOOL])
            before = self._render(messages[:2], [])
        except RequestRefused:
            return False
        shown = all(name in text for name in ("probe-tool", "probe-answer"))
        return shown and texts.parse(before[before.find("<tool_call>") :]).calls[:1] == (_PROBE,)
