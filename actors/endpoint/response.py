"""An answer in OpenAI's form: one JSON object, or the events of a stream; pure."""

import json
from typing import Any

from actors.endpoint.request import Asked, Refused
from actors.endpoint.session import Answer


def whole(asked: Asked, answer: Answer, now_s: int) -> bytes:
    """The body of an answer that is not streamed."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", **_said(answer)},
        "logprobs": None,
        "finish_reason": answer.finish,
    }
    value = _frame("chat.completion", asked, answer, now_s)
    return _json(value | {"choices": [choice], "usage": _usage(answer)})


def events(asked: Asked, answer: Answer, now_s: int) -> bytes:
    """The body of a stream: all that was said, how it ended, its numbers where they are wanted."""
    said = _said(answer)
    for index, call in enumerate(said.get("tool_calls", [])):
        call["index"] = index
    deltas = (({"role": "assistant", **said}, None), ({}, answer.finish))
    choices: list[list[dict[str, Any]]] = [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
        for delta, finish in deltas
    ]
    frame = _frame("chat.completion.chunk", asked, answer, now_s)
    values = [frame | {"choices": choice} for choice in choices]
    if asked.usage:
        values.append(frame | {"choices": [], "usage": _usage(answer)})
    return b"".join(b"data: %s\n\n" % part for part in [*map(_json, values), b"[DONE]"])


def refusal(refused: Refused) -> bytes:
    """The body of an error."""
    error = {"message": str(refused), "type": "invalid_request_error", "param": None}
    return _json({"error": error | {"code": refused.code}})


def models() -> bytes:
    """The body of the list of models: there is one."""
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "evolver-async"}
    return _json({"object": "list", "data": [model]})


def _frame(kind: str, asked: Asked, answer: Answer, now_s: int) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.name}",
        "object": kind,
        "created": now_s,
        "model": asked.model,
        "system_fingerprint": answer.weights,
    }


def _said(answer: Answer) -> dict[str, Any]:
    content, calls = answer.said.content, answer.said.calls
    if not calls:
        return {"content": content}
    listed = [
        {
            "id": f"call-{answer.name}/{index}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"content": content or None, "tool_calls": listed}


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.read + answer.written
    return {
        "prompt_tokens": answer.read,
        "completion_tokens": answer.written,
        "total_tokens": total,
    }


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
