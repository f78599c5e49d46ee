"""Encoding of answers in OpenAI's form, as one JSON object or as the events of a stream; pure."""

import json
from typing import Any

from actors.endpoint.request import ChatRequest, RequestRefused
from actors.endpoint.session import Completion


def whole(request: ChatRequest, answer: Completion, now_s: int) -> bytes:
    """Encode an answer that is not streamed."""
    message = {"role": "assistant", **_message(answer)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}
    value = _frame("chat.completion", request, answer, now_s)
    return _json(value | {"choices": [choice], "usage": _usage(answer)})


def events(request: ChatRequest, answer: Completion, now_s: int) -> bytes:
    """Encode a stream: the message, the finish reason and, if requested, the token counts."""
    message = _message(answer)
    for index, call in enumerate(message.get("tool_calls", [])):
        call["index"] = index
    deltas = (({"role": "assistant", **message}, None), ({}, answer.finish))
    choices: list[list[dict[str, Any]]] = [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
        for delta, finish in deltas
    ]
    frame = _frame("chat.completion.chunk", request, answer, now_s)
    values = [frame | {"choices": choice} for choice in choices]
    if request.usage:
        values.append(frame | {"choices": [], "usage": _usage(answer)})
    return b"".join(b"data: %s\n\n" % part for part in [*map(_json, values), b"[DONE]"])


def refusal(refused: RequestRefused) -> bytes:
    """Encode an error."""
    error = {"message": str(refused), "type": "invalid_request_error", "param": None}
    return _json({"error": error | {"code": refused.code}})


def models() -> bytes:
    """Encode the list of models, which has one entry."""
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "evolver-async"}
    return _json({"object": "list", "data": [model]})


def _frame(kind: str, request: ChatRequest, answer: Completion, now_s: int) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.name}",
        "object": kind,
        "created": now_s,
        "model": request.model,
        "system_fingerprint": answer.weights,
    }


def _message(answer: Completion) -> dict[str, Any]:
    content, calls = answer.turn.content, answer.turn.calls
    if not calls:
        return {"content": content}
    listed = []
    for index, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": arguments}
        call = {"id": f"call-{answer.name}/{index}", "type": "function", "function": function}
        listed.append(call)
    return {"content": content or None, "tool_calls": listed}


def _usage(answer: Completion) -> dict[str, int]:
    asked, written = answer.prompt_tokens, answer.completion_tokens
    total = {"total_tokens": asked + written}
    return {"prompt_tokens": asked, "completion_tokens": written, **total}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
