"""Tools, calls and results of tools as one chat template writes them.

Which syntax of calls a template writes is found by having it render a call and reading that. What
stands between a turn of the policy and its next one is cut out of a rendering in which a call
stands for that turn, so what was sampled is never tokenised again.
"""

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

from actors.formats.chat import ASSISTANT, USER, Chat
from actors.formats.syntaxes import SYNTAXES, Schemas, Syntax, SyntaxCall

_PROBE = SyntaxCall("probe_name", {"probe_key": "probe-value"})
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
    },
}
Messages = list[dict[str, Any]]


class Native:
    """Tools of one chat template. `syntax`: None if the template does not list tools, or writes
    calls in no known syntax; then the other methods are of no use.

    What a call is followed by ends a turn too: `<|call|>` of harmony, `<|observation|>` of GLM.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._as_text = False  # arguments of a call are the text of an object
        self._named = False  # a call's id is functions.name:0, as Kimi's, else nine digits
        self.syntax = self._found()
        if self.syntax is not None:
            answer = self.result("probe-answer", _PROBE, 0)
            chat.stop_at(chat.mark(self.after([_PROBE], [answer])))

    def assistant(
        self, content: str, calls: Sequence[SyntaxCall], first: int = 0
    ) -> dict[str, Any]:
        """Return a message of the assistant with calls. `first`: number of the first call in the
        conversation."""
        if not calls:
            return {"role": "assistant", "content": content}
        listed = []
        for number, call in enumerate(calls, first):
            arguments = json.dumps(call.arguments) if self._as_text else call.arguments
            function = {"name": call.name, "arguments": arguments}
            one = {"type": "function", "id": self._id(call, number), "function": function}
            listed.append(one)
        return {"role": "assistant", "content": content, "tool_calls": listed}

    def written(self, calls: Sequence[SyntaxCall]) -> str:
        """Return the text of a turn of the policy that makes these calls and says nothing else."""
        begun = {"role": "user", "content": USER}
        said = [begun, {"role": "assistant", "content": ASSISTANT}]
        before = self._chat.render(said, opens=False).partition(ASSISTANT)[0]
        text = self._chat.render([begun, self.assistant("", calls)], opens=False)
        if not text.startswith(before):
            before = before.removesuffix(self._chat.opening)
        return self._chat.until_stop(text.removeprefix(before))

    def result(self, content: str, call: SyntaxCall | None, number: int) -> dict[str, Any]:
        """Return a message with what a call, the conversation's `number`th, resulted in. None: it
        is not known which one."""
        call = call or SyntaxCall("tool", {})
        named = {"name": call.name, "tool_call_id": self._id(call, number)}
        return {"role": "tool", "content": content, **named}

    def after(
        self,
        calls: Sequence[SyntaxCall],
        messages: Messages,
        switches: dict[str, Any] | None = None,
    ) -> str:
        """Render what stands behind a turn of the policy with these calls, if any, up to where it
        writes again. ValueError if the template does not render that turn; it raises what it
        raises."""
        if not calls:
            turn, sentinel = {"role": "assistant", "content": ASSISTANT}, ASSISTANT
        else:
            sentinel = "sentinel-of-calls"
            marked = [*calls[:-1], calls[-1]._replace(arguments={"probe_key": sentinel})]
            turn = self.assistant("", marked)
        begun = {"role": "user", "content": USER}
        text = self._chat.render([begun, turn, *messages], None, **(switches or {}))
        _, found, text = text.rpartition(sentinel)
        if not found:
            raise ValueError("the chat template does not render a turn of the assistant")
        if not calls:
            return text
        assert self.syntax is not None, "no template that writes calls"
        end = self.syntax.end.match(text)
        if end is None:
            raise ValueError("the chat template does not end a call as it is read")
        return text[end.end() :]

    def _id(self, call: SyntaxCall, number: int) -> str:
        """Return the id of a call: that which the policy gave it, or as its model is used to.
        Mistral's templates ask for nine letters or digits."""
        return call.id or (f"functions.{call.name}:{number}" if self._named else f"{number:09d}")

    def _found(self) -> Syntax | None:
        ways = product((False, True), (False, True), (ASSISTANT, ""))
        for self._as_text, self._named, content in ways:
            turn = self._rendered_turn(content)
            for syntax in SYNTAXES if turn else ():
                read = syntax.turn(turn or "").calls
                if [call._replace(id="") for call in read] == [_PROBE]:
                    return syntax
        return None

    def _rendered_turn(self, content: str) -> str | None:
        """Return how the template writes a call behind `content`; None if it does not write tools,
        the call or its result."""
        begun = {"role": "user", "content": USER}
        called = [begun, self.assistant(content, [_PROBE])]
        answer = self.result("probe-answer", _PROBE, 0)
        try:
            whole = self._chat.render([*called, answer], [_TOOL])
            alone = self._chat.render(called, opens=False)
        except Exception:  # templates raise exceptions of any kind
            return None
        if not all(one in whole for one in ("probe_tool", "probe_name", "probe-answer")):
            return None
        head = content or self._chat.opening
        _, found, turn = alone.rpartition(head)
        return self._chat.until_stop(turn) if found else None


def schemas(tools: Sequence[Any]) -> Schemas:
    """Return the schemas of the arguments of tools, as OpenAI's API has them or bare."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    return {
        one["name"]: one["parameters"]
        for one in functions
        if isinstance(one.get("name"), str) and isinstance(one.get("parameters"), dict)
    }
