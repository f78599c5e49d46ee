"""Anthropic's Messages API: its requests, and answers as one JSON object or as events; pure."""

import json
from collections.abc import Iterator
from typing import Any

from actors.endpoint import request as parts
from actors.endpoint.request import ChatMessage, ChatRequest, RequestRefused, require
from actors.endpoint.session import Completion
from actors.endpoint.structure import structure_of

_USED = (
    *("messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "model"),
    *("stream", "output_config"),
)
_IGNORED = (
    *("temperature", "metadata", "service_tier", "thinking", "cache_control"),
    *("inference_geo", "speed"),
)
_ERRORS = {  # by status
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}


def decode(body: bytes) -> ChatRequest:
    """Decode the body of a request. Raise RequestRefused, which names the key."""
    value = parts.body_of(body)
    ignored = parts.check_keys(value, _USED, _IGNORED, {})
    output = value.get("output_config")
    output = output if isinstance(output, dict) else {}
    structure = structure_of("output_config.format", output.get("format"))
    system = parts.text_of(value.get("system"))
    messages = [ChatMessage("system", system)] if system else []
    raw = ""
    for one in parts.list_of(value, "messages"):
        said, raw = _messages(one)
        messages += said
    earlier, prefill = parts.prefilled(messages, raw)
    tools, tools_text, strict = parts.tools_of([*map(_function, parts.list_of(value, "tools"))])
    forced, none, many = _tool_choice(value.get("tool_choice"))
    calling, forced, single = parts.choice_of(tools, forced, none, many)
    return ChatRequest(
        messages=earlier,
        model=parts.model_of(value),
        tools=tools,
        tools_text=tools_text,
        strict=strict,
        structure=structure,
        calling=calling,
        forced=forced,
        single=single,
        prefill=prefill,
        max_tokens=parts.whole_number(value, "max_tokens"),
        stop=parts.stop_of(value.get("stop_sequences"), "stop_sequences"),
        stream=value.get("stream") is True,
        ignored=(*ignored, *(["output_config.effort"] if output.get("effort") else [])),
    )


def whole(request: ChatRequest, answers: list[Completion], now_s: int) -> bytes:
    """Encode an answer that is not streamed."""
    return json.dumps(_message(request, answers[0])).encode()


def events(request: ChatRequest, answers: list[Completion], now_s: int) -> bytes:
    """Encode a stream: every block with its text or input in one piece."""
    return b"".join(
        f"event: {kind}\ndata: {json.dumps({'type': kind, **value})}\n\n".encode()
        for kind, value in _events(_message(request, answers[0]))
    )


def refusal(refused: RequestRefused) -> bytes:
    """Encode an error."""
    kind = _ERRORS.get(refused.status, "invalid_request_error")
    error = {"type": kind, "message": str(refused), "code": refused.code}
    return json.dumps({"type": "error", "error": error}).encode()


def _messages(value: Any) -> tuple[list[ChatMessage], str]:
    """Return the messages of one of theirs, and the text of an assistant's as it is.

    Each tool result is a message of its own, the text between them one of the user's.
    """
    require(isinstance(value, dict), "messages: each must be an object")
    role, content = value.get("role"), value.get("content")
    require(role in ("user", "assistant", "system"), f"messages: the role {role!r}: not supported")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    require(isinstance(blocks, list), "messages: content must be text or blocks")
    found: list[ChatMessage] = []
    text, calls = "", []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            calls.append(parts.call_of(block.get("name"), block.get("input")))
        elif kind == "tool_result" and role == "user":
            found += [ChatMessage(role, text)] if text else []
            text = ""
            found.append(ChatMessage("tool", parts.text_of(block.get("content"))))
        else:
            text += parts.text_of([block])
    if role == "assistant":
        return [ChatMessage(role, text.strip(), tuple(calls))], text
    if text or not found:
        found.append(ChatMessage(role, text))
    return found, ""


def _function(tool: Any) -> tuple[Any, Any, Any, Any]:
    kind = tool.get("type", "custom") if isinstance(tool, dict) else None
    if kind not in ("custom", None) or not isinstance(tool, dict):
        problem = f"tools: of type {kind!r}: the agent's own functions alone are supported"
        raise RequestRefused(problem[:500])
    strict = tool.get("strict") is True
    return tool.get("name"), tool.get("description"), tool.get("input_schema"), strict


def _tool_choice(choice: Any) -> tuple[str | None, bool, bool]:
    """Return the forced tool ("" for any, None for none), True if no tool may be called, and False
    if at most one may."""
    choice = {"type": "auto"} if choice is None else choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    name = choice.get("name") if kind == "tool" else ""
    if kind not in ("auto", "any", "tool", "none") or not (isinstance(name, str)):
        raise RequestRefused(f"tool_choice: {choice!r} is not supported"[:500])
    forced = name if kind in ("any", "tool") else None
    return forced, kind == "none", choice.get("disable_parallel_tool_use") is not True


def _message(request: ChatRequest, answer: Completion) -> dict[str, Any]:
    content, calls = answer.turn.content, answer.turn.calls
    blocks = [{"type": "text", "text": content}] if content or not calls else []
    for index, (name, arguments) in enumerate(calls):
        block = {"type": "tool_use", "id": answer.call_id(index), "name": name}
        blocks.append(block | {"input": json.loads(arguments)})
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    reason = "stop_sequence" if answer.stop else reasons.get(answer.finish, "end_turn")
    return {
        "id": f"msg_{answer.name}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": blocks,
        "stop_reason": "tool_use" if calls else reason,
        "stop_sequence": answer.stop or None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def _events(message: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kinds and the values of a stream's events."""
    ending = {"stop_reason": None, "stop_sequence": None}
    usage = message["usage"]
    begun = message | ending | {"content": [], "usage": usage | {"output_tokens": 0}}
    yield "message_start", {"message": begun}
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            written = json.dumps(block["input"])
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": written}
        yield "content_block_start", {"index": index, "content_block": block | empty}
        yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    ended = {name: message[name] for name in ending}
    yield "message_delta", {"delta": ended, "usage": usage}
    yield "message_stop", {}
