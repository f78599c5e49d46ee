"""OpenAI's chat completions: their requests, and answers as one JSON object or as events; pure."""

import json
from collections.abc import Collection
from typing import Any

from actors.endpoint import request as parts
from actors.endpoint.request import ChatMessage, ChatRequest, RequestRefused, require
from actors.endpoint.session import Completion
from actors.endpoint.structure import structure_of

ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # keys of which only these values are supported
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "top_logprobs": (None, 0),  # the engine knows those of the sampled tokens alone
    "audio": (None,),
    "modalities": (None, ["text"]),
}
_USED = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens"),
    *("max_completion_tokens", "stop", "model", "n", "logprobs", "stream", "stream_options"),
    *("chat_template_kwargs", "response_format"),
)
IGNORED = (
    *("temperature", "seed", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "verbosity", "prediction"),
)


def decode(body: bytes) -> ChatRequest:
    """Decode the body of a request. Raise RequestRefused, which names the key."""
    value = parts.body_of(body)
    ignored = parts.check_keys(value, _USED, IGNORED, _NEUTRAL)
    structure = structure_of("response_format", value.get("response_format"), "json_schema")
    given = parts.list_of(value, "messages")
    messages = [*map(_message, given)]
    raw = parts.text_of(given[-1].get("content")) if given else ""
    earlier, prefill = parts.prefilled(messages, raw)
    tools, tools_text, strict = parts.tools_of([*map(_function, parts.list_of(value, "tools"))])
    calling, forced, single = parts.choice_of(
        tools, *forced_tool(value), value.get("parallel_tool_calls")
    )
    options = value.get("stream_options")
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
        max_tokens=parts.whole_number(value, "max_completion_tokens", "max_tokens"),
        stop=parts.stop_of(value.get("stop")),
        choices=parts.whole_number(value, "n", most=parts.MAX_CHOICES) or 1,
        logprobs=value.get("logprobs") is True,
        stream=value.get("stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        switches=_switches(value.get("chat_template_kwargs")),
        ignored=ignored,
    )


def _switches(value: Any) -> dict[str, Any]:
    """Return variables of the chat template, such as `enable_thinking`."""
    value = {} if value is None else value
    require(isinstance(value, dict), "chat_template_kwargs: must be an object")
    return value


def forced_tool(value: dict[str, Any]) -> tuple[str | None, bool]:
    """Return the forced tool, "" for any and None for none, and True if no tool may be called.

    A tool is named as chat completions name it, or as the Responses API does.
    """
    choice = value.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None, choice == "none"
    if choice == "required":
        return "", False
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name:
            return name, False
    raise RequestRefused(f"tool_choice: {choice!r} is not supported"[:500])


def whole(request: ChatRequest, answers: list[Completion], now_s: int) -> bytes:
    """Encode answers that are not streamed."""
    choices = []
    for index, answer in enumerate(answers):
        message = {"role": "assistant", **_message_of(answer), "refusal": None}
        choice = {"index": index, "message": message, "logprobs": _logprobs(request, answer)}
        choices.append(choice | {"finish_reason": answer.finish})
    value = _frame("chat.completion", request, answers[0], now_s)
    return _json(value | {"choices": choices, "usage": _usage(answers)})


def events(request: ChatRequest, answers: list[Completion], now_s: int) -> bytes:
    """Encode a stream: each message with its finish reason and, if requested, the token counts."""
    frame = _frame("chat.completion.chunk", request, answers[0], now_s)
    values = []
    for number, answer in enumerate(answers):
        message = _message_of(answer)
        for index, call in enumerate(message.get("tool_calls", [])):
            call["index"] = index
        logprobs = _logprobs(request, answer)
        for delta, known, finish in (
            ({"role": "assistant", **message}, logprobs, None),
            ({}, None, answer.finish),
        ):
            choice = {"index": number, "delta": delta, "logprobs": known, "finish_reason": finish}
            values.append(frame | {"choices": [choice]})
    if request.usage:
        values.append(frame | {"choices": [], "usage": _usage(answers)})
    return b"".join(b"data: %s\n\n" % part for part in [*map(_json, values), b"[DONE]"])


def refusal(refused: RequestRefused) -> bytes:
    """Encode an error."""
    error = {"message": str(refused), "type": "invalid_request_error", "param": None}
    return _json({"error": error | {"code": refused.code}})


def models(players: Collection[str]) -> bytes:
    """Encode the list of models: one for each player, which are the same policy, or one in all."""
    model = {"object": "model", "created": 0, "owned_by": "evolver-async"}
    entries = [{"id": name, **model} for name in players or [parts.POLICY]]
    return _json({"object": "list", "data": entries})


def listed(answer: Completion) -> list[dict[str, Any]]:
    """Return the log-prob of each sampled token, as OpenAI's APIs list them."""
    return [
        {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
        for text, logprob in answer.logprobs
    ]


def _message(value: Any) -> ChatMessage:
    require(isinstance(value, dict), "messages: each must be an object")
    role, content = value.get("role"), parts.text_of(value.get("content"))
    if role == "assistant":
        calls = tuple(map(_call, parts.list_of(value, "tool_calls")))
        return ChatMessage(role, content.strip(), calls)
    known = isinstance(role, str) and role in ROLES
    require(known, f"messages: the role {role!r} is not supported")
    return ChatMessage(ROLES[role], content)


def _call(value: Any) -> parts.ChatToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise RequestRefused("messages: tool_calls must have a function")
    return parts.call_of(function.get("name"), function.get("arguments"))


def _function(tool: Any) -> tuple[Any, Any, Any, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise RequestRefused("tools: each must be a named function")
    name, parameters = function.get("name"), function.get("parameters")
    return name, function.get("description"), parameters, function.get("strict") is True


def _frame(kind: str, request: ChatRequest, answer: Completion, now_s: int) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.name}",
        "object": kind,
        "created": now_s,
        "model": request.model,
        "system_fingerprint": answer.weights,
    }


def _message_of(answer: Completion) -> dict[str, Any]:
    content, calls = answer.turn.content, answer.turn.calls
    if not calls:
        return {"content": content}
    written = []
    for index, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": arguments}
        written.append({"id": answer.call_id(index), "type": "function", "function": function})
    return {"content": content or None, "tool_calls": written}


def _logprobs(request: ChatRequest, answer: Completion) -> dict[str, Any] | None:
    return {"content": listed(answer), "refusal": None} if request.logprobs else None


def _usage(answers: list[Completion]) -> dict[str, int]:
    asked = answers[0].prompt_tokens
    written = sum(answer.completion_tokens for answer in answers)
    total = {"total_tokens": asked + written}
    return {"prompt_tokens": asked, "completion_tokens": written, **total}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
