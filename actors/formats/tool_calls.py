"""Actions that are tool calls: their canonical text, and the two turn formats that write them.

In both the answer is a call too, of the tool `answer`, so that an environment gets one form of
action. Errors that a policy can mend are shown to it as the output of the tool.
"""

import json
import re
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from actors.formats.syntaxes import escaped_controls
from actors.formats.tags import TaggedBlock, blocks, thought_end

T = TypeVar("T")
ANSWER_TOOL, CODE_TOOL = "answer", "python"
UNCLOSED = "error: <tool_call> without </tool_call>"
NO_CALL = "error: neither a tool call nor an answer could be read"
NO_CODE = "error: neither code nor an answer could be read"
_BOX = re.compile(r"\\boxed\{|[{}]")
_FENCED = re.compile(r"```(?:python|py)?\n(.*?)\n?```", re.DOTALL)


class ToolInvocation(msgspec.Struct, frozen=True):
    """Name and arguments of a tool call."""

    name: str
    arguments: dict[str, Any] = {}


class WrittenCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tool call as models write it: its arguments as an object, as the text of one, or left out.
    `id` and `type`, from OpenAI's form, mean nothing."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: dict[str, Any] | str | None = None
    id: Any = None
    type: Any = None


class InvalidCall(NamedTuple):
    """A call that cannot be carried out; `complaint` is shown to the policy."""

    complaint: str


def tool_spec(name: str, does: str, argument: str, **meaning: Any) -> dict[str, Any]:
    """Return the spec of a tool with one argument, a text; `meaning`: more of its JSON schema."""
    properties = {argument: {"type": "string"} | meaning}
    schema = {"type": "object", "properties": properties, "required": [argument]}
    return {"name": name, "description": does, "parameters": schema}


def canonical(name: str, arguments: dict[str, Any]) -> str:
    """Write a call as an action: JSON of `name` and `arguments`, in this order."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def called(text: str) -> ToolInvocation:
    """Parse a call from JSON, whose texts may have raw newlines; ValueError gives the reason on one
    line."""
    try:
        return with_arguments(_decoded(text, WrittenCall))
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ValueError(f"this is no call as JSON: {error}") from error


def with_arguments(call: WrittenCall) -> ToolInvocation:
    """Return a call with its arguments as an object. Raise ValueError or RecursionError if their
    text is none."""
    arguments = call.arguments or {}
    if isinstance(arguments, str):
        arguments = _decoded(arguments, dict[str, Any])
    return ToolInvocation(call.name, arguments)


def _decoded(text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError:
        return msgspec.json.decode(escaped_controls(text), type=kind)


class ToolCall:
    """Turn format with `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; the result
    follows in a message of the user between `<tool_response>` tags, and the episode ends with
    `<answer>...</answer>`.

    With `think` a turn opens with `<reason>...</reason>`. Several calls stand in a row; then the
    end-of-turn token ends them, which the policy has to write.
    """

    inline = False
    tools = True

    def __init__(self, *, think: bool, actions_per_turn: int) -> None:
        self.actions_per_turn = actions_per_turn
        self.prefix = "<reason>" if think else ""
        self.stop_strings: tuple[str, ...] = ("</answer>",)
        if actions_per_turn == 1:
            self.stop_strings += ("</tool_call>",)
        self.min_tokens = 4 if think else 3
        reason = "<reason> why</reason>, then " if think else ""
        several = f" (up to {actions_per_turn} in a row)" if actions_per_turn > 1 else ""
        self.instructions = (
            f'reply with {reason}<tool_call>{{"name": name, "arguments": {{...}}}}</tool_call>'
            f"{several} or at last with <answer> answer</answer>"
        )
        reasoning = "Begin every turn with <reason>your reasoning</reason>. " if think else ""
        limit = f" You can make up to {actions_per_turn} calls in a row." if several else ""
        self.plain_instructions = (
            f"{reasoning}To call one of the tools below, write"
            ' <tool_call>{"name": "the tool", "arguments": {"an argument": "its value"}}'
            f"</tool_call>.{limit} The result comes back between <tool_response> and"
            " </tool_response>. When you know the answer, write <answer>your answer</answer>."
        )

    def parse(self, text: str) -> list[str | InvalidCall] | None:
        if self.prefix:
            _, found, text = text.partition("</reason>")
            if not found:
                return None
        text = text[thought_end(text, "tool_call", "answer") :]
        actions: list[str | InvalidCall] = []
        for block in blocks(text, "tool_call", "answer"):
            if block.tag == "answer" and not block.closed:
                continue
            if len(actions) == self.actions_per_turn:
                limit = f"error: at most {self.actions_per_turn} calls in one turn"
                return [*actions, InvalidCall(limit)]
            actions.append(_call(block))
            if not block.closed:
                break
        return actions or None

    def render_actions(self, actions: list[str]) -> str:
        parts = ["</reason>"] if self.prefix else []
        for action in actions:
            call = called(action)
            if call.name == ANSWER_TOOL:
                parts.append(f"<answer>{call.arguments['text']}</answer>")
            else:
                parts.append(f"<tool_call>\n{action}\n</tool_call>")
        return "\n".join(parts)

    def shown(self, outputs: list[str], valid: bool, last: str) -> str:
        if not outputs:
            return NO_CALL
        return "\n".join(_between("tool_response", output) for output in outputs)


class Interleaved:
    """Turn format with one message, in which `<code>...</code>` is run where it stands, up to
    `<answer>\\boxed{...}</answer>`.

    What the code printed follows it between `<interpreter>` tags, in the same message. A turn is
    what is written between two such pauses. ValueError names the key that does not fit.
    """

    inline = True
    tools = True
    prefix = ""
    stop_strings: tuple[str, ...] = ("</code>", "</answer>")
    actions_per_turn = 1
    min_tokens = 3
    instructions = (
        "think, and where it helps run <code> code</code>, whose output follows it between"
        " <interpreter> tags; end with <answer> \\boxed{answer}</answer>"
    )
    plain_instructions = (
        "Think step by step. Where a computation helps, write a Python program between <code> and"
        " </code>; it is run, and its output follows between <interpreter> and </interpreter>."
        " End with your answer in this format: <answer>\\boxed{your answer}</answer>"
    )

    def __init__(self, *, think: bool, actions_per_turn: int) -> None:
        if actions_per_turn != 1:
            problem = f"must be 1 where rollout.format is interleaved, is {actions_per_turn}"
            raise ValueError(f"rollout.actions_per_turn: {problem}")
        if think:
            raise ValueError("rollout.think: interleaved text holds its thoughts without a tag")

    def parse(self, text: str) -> list[str | InvalidCall] | None:
        answer = _at_the_end(text, "answer")
        if answer is not None:
            return _answered(answer)
        code = unfenced((_at_the_end(text, "code") or "").strip("\r\n"))
        return [canonical(CODE_TOOL, {"code": code})] if code.strip() else None

    def render_actions(self, actions: list[str]) -> str:
        (action,) = actions
        call = called(action)
        if call.name == ANSWER_TOOL:
            return f"<answer>\\boxed{{{call.arguments['text']}}}</answer>"
        return f"<code>\n{call.arguments['code']}\n</code>"

    def shown(self, outputs: list[str], valid: bool, last: str) -> str:
        said = "\n".join(outputs) if outputs else NO_CODE
        return f"\n{_between('interpreter', said)}\n"


def _call(block: TaggedBlock) -> str | InvalidCall:
    """Parse one call or answer of a turn."""
    if block.tag == "answer":
        answer = _answered(block.body)
        return InvalidCall("error: the answer is empty") if answer is None else answer[0]
    if not block.closed:
        return InvalidCall(UNCLOSED)
    try:
        call = called(block.body)
        written = canonical(call.name, call.arguments)
    except (ValueError, RecursionError) as error:
        return InvalidCall(f"error: {error}")
    if call.name == ANSWER_TOOL:
        return InvalidCall("error: an answer stands between <answer> and </answer>")
    return written


def unfenced(code: str) -> str:
    """Remove the Markdown fence around a program, if any."""
    found = _FENCED.fullmatch(code.strip())
    return found[1] if found else code


def _at_the_end(text: str, tag: str) -> str | None:
    """Return what stands between a tag's first opening and its closing at the end of the text; None
    if there is no such pair."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    text = text.rstrip()
    start = text.find(opening)
    if start < 0 or not text.endswith(closing, start + len(opening)):
        return None
    return text[start + len(opening) : -len(closing)]


def boxed(text: str) -> str | None:
    """Return the content of the last closed box, with balanced braces; None without one."""
    last, box = -1, None
    open_braces: list[re.Match[str]] = []
    for brace in _BOX.finditer(text):
        if brace[0] != "}":
            open_braces.append(brace)
        elif open_braces:
            opening = open_braces.pop()
            if opening[0] != "{" and opening.start() > last:
                last, box = opening.start(), text[opening.end() : brace.start()]
    return box


def _answered(text: str) -> list[str | InvalidCall] | None:
    """Parse the answer between its tags, in a box or bare; None if it is empty."""
    found = boxed(text)
    answer = (text if found is None else found).strip()
    return [canonical(ANSWER_TOOL, {"text": answer})] if answer else None


def _between(tag: str, text: str) -> str:
    """Put a tool's output between tags that it cannot close itself."""
    return f"<{tag}>\n{text.replace(f'</{tag}', f'</ {tag}')}\n</{tag}>"
