"""Rendering of messages and tools with a chat template, as whole conversations or continuations.

A template that lists tools, and writes calls in a syntax that `formats.syntaxes` reads, is used as
it is. For any other, tools and calls are written as text into the messages that it supports.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from actors.endpoint import structure
from actors.endpoint import tools as texts
from actors.endpoint.request import ChatMessage, ChatRequest, RequestRefused
from actors.formats.chat import Chat
from actors.formats.native import Native, schemas
from actors.formats.syntaxes import TAGGED, SyntaxCall
from actors.formats.tags import THOUGHT, escaped_response

_TAIL = 16  # tokens of a context in which the opening of a thought is looked for


class Template:
    """Chat template of one tokenizer. `native`: True if it supports tools itself, whose calls it
    writes in `syntax`."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._tools = Native(chat)
        self.syntax = self._tools.syntax
        self.native = self.syntax is not None
        self._opens = not self.native or self._writes_json()  # as `tools.opened` does

    def parse(
        self, text: str, tools: list[dict[str, Any]]
    ) -> tuple[texts.ParsedTurn, tuple[str, ...]]:
        """Parse a turn that may call these tools. Second: the names that the calls have in it, each
        "" where the syntax has none."""
        read = (self.syntax or TAGGED).turn(text, schemas(tools))
        return texts.parsed(read), tuple(call.id for call in read.calls)

    def first(self, request: ChatRequest) -> list[int]:
        """Render a whole conversation up to the policy's turn. Raise RequestRefused."""
        switches = self._switches(request)
        messages, tools = self.conversation(request.messages, request.tools)
        return self._chat.whole_tokens(
            _rendered(lambda: self._chat.render(messages, tools, **switches))
        )

    def conversation(
        self, said: tuple[ChatMessage, ...], tools: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return messages and tools as the template takes them; the assistant's are as many."""
        tools = [self._chat.plain_value(tool) for tool in tools]
        messages = self._messages(said, [])
        if tools and not self.native:
            described = {"role": "system", "content": texts.instructions(tools)}
            if messages[0]["role"] == "system":
                described["content"] = f"{messages[0]['content']}\n\n{described['content']}"
                messages = messages[1:]
            messages, tools = [described, *messages], []
        return self._chat.supported(messages), tools

    def next(self, request: ChatRequest, since: int, ids: Sequence[str], last: int) -> list[int]:
        """Render the tokens between the policy's turn, whose last token is `last`, and its next.
        `since`: number of the request's messages up to that turn; `ids`: the names of its calls
        there.

        Raise RequestRefused.
        """
        turn, messages = request.messages[since - 1], request.messages[since:]
        switches = self._switches(request)
        named = [self._call(*call, id) for call, id in zip(turn.calls, ids, strict=True)]
        said = self._messages(messages, named)
        after = _rendered(lambda: self._tools.after(named if self.native else [], said, switches))
        return self._chat.behind(last, self._chat.tokens_of(after))

    def tokens_of(self, text: str) -> list[int]:
        return self._chat.tokens_of(text)

    def given(self, request: ChatRequest, context: list[int]) -> str:
        """Return the beginning of the policy's turn, behind `context`, that it does not write: the
        client's prefill, and the opening of a call that it must make.

        Neither a call nor a structured answer follows a thought, so one that the template opens is
        closed. Raise RequestRefused where the syntax of calls cannot be forced.
        """
        if request.once and self.native and self.syntax is not TAGGED:
            raise RequestRefused("parallel_tool_calls: this template's syntax ends no call")
        if request.forced is None and request.structure is None:
            return self._chat.plain(request.prefill)
        if request.forced is not None and not self._opens:
            raise RequestRefused("tool_choice: this template's syntax of calls cannot be forced")
        thinks = (
            self._chat.decoded(context[-_TAIL:]).rstrip().endswith(THOUGHT) and not request.prefill
        )
        begun = "\n</think>\n\n" if thinks else self._chat.plain(request.prefill)
        if request.forced is None:
            return begun
        return begun + texts.opened(self._chat.plain(request.forced))

    def grammar(self, request: ChatRequest) -> str:
        """Return the grammar of what follows `given`, "" if anything may. Raise RequestRefused for
        a form that cannot be prescribed.

        Arguments of a strict tool obey its schema in a template that writes calls as JSON. Where
        one tool is strict, calls of the others are at least objects.
        """
        form, single = request.structure, request.single
        tools = list[tuple[str, dict[str, Any]]]()
        for tool in request.tools if request.calling and self._opens else ():
            name, schema = tool["function"]["name"], structure.ANY_OBJECT
            if name in request.strict:
                schema = tool["function"].get("parameters") or schema
                structure.check(f"tools: {name}", schema)
            tools.append((self._chat.plain(name), schema))
        if form is not None and request.forced is None:
            if request.prefill:
                raise RequestRefused(f"{form.key}: the last message must not be the assistant's")
            if not request.calling:
                return structure.grammar(structure.answer(form.schema))
            if not self._opens:
                problem = "this template's syntax of calls cannot be prescribed: tool_choice none"
                raise RequestRefused(f"{form.key}: beside tools {problem} is needed")
            return structure.grammar(structure.answer_or_calls(form.schema, tools, single=single))
        forced = request.forced
        if forced:
            tools = [tool for tool in tools if tool[0] == self._chat.plain(forced)]
            strict = forced in request.strict
        else:
            strict = bool(request.strict)
        if not (strict and tools):
            return ""
        if forced is None:
            return structure.grammar(structure.calls_in_text(tools))
        if forced:
            return structure.grammar(structure.rest_of_call(tools[0][1]))
        return structure.grammar(structure.rest_of_calls(tools, single=single))

    def _messages(
        self, messages: tuple[ChatMessage, ...], calls: list[SyntaxCall]
    ) -> list[dict[str, Any]]:
        """Convert messages to the roles that the template supports. `calls`: those before them,
        which results are of, in their order."""
        found: list[dict[str, Any]] = []
        responses: list[str] = []  # of consecutive tool messages, which are one message as text
        waiting, number = list(enumerate(calls)), len(calls)  # numbered over the conversation
        for role, text, called in messages:
            content = self._chat.plain(escaped_response(text) if role == "tool" else text)
            if role == "tool" and not self.native:
                if not responses:
                    found.append({"role": "user"})
                responses.append(content)
                found[-1]["content"] = texts.tool_responses(responses)
                continue
            if role == "tool":
                of, call = waiting.pop(0) if waiting else (number, None)
                found.append(self._tools.result(content, call, of))
                continue
            responses = []
            message: dict[str, Any] = {"role": role, "content": content}
            if called and self.native:
                made = [self._call(*call) for call in called]
                message = self._tools.assistant(content, made, number)
                waiting, number = list(enumerate(made, number)), number + len(made)
            elif called:
                message["content"] = self._chat.plain(texts.assistant_text(text, called))
            found.append(message)
        return found

    def _writes_json(self) -> bool:
        """Return True if the template writes calls as `tools.assistant_text` does."""
        called = self._tools.assistant("", [SyntaxCall("probe_name", {"probe_key": ""})])
        messages = [{"role": "user", "content": ""}, called]
        written = self._chat.render(messages, opens=False)
        return self.syntax is TAGGED and '<tool_call>\n{"name": "probe_name"' in written

    def _switches(self, request: ChatRequest) -> dict[str, Any]:
        """Return variables for the template. Raise RequestRefused for one not its own."""
        if taken := sorted(self._chat.reserved & request.switches.keys()):
            raise RequestRefused(f"chat_template_kwargs: {taken[0]} cannot be set")
        return dict(request.switches)

    def _call(self, name: str, arguments: str, id: str = "") -> SyntaxCall:
        return SyntaxCall(self._chat.plain(name), self._chat.plain_value(json.loads(arguments)), id)


def _rendered(render: Callable[[], str]) -> str:
    try:
        return render()
    except Exception as error:  # templates raise exceptions of any kind
        raise RequestRefused(f"messages: the chat template rejects them: {error}") from None
