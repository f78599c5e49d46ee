"""OpenAI's Responses API: its requests, and answers as one JSON object or as events; pure.

One answer is one message of the policy, which this API lists as items: its text, then its calls. An
episode remembers its own answers, so `previous_response_id` continues one of them.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from actors.endpoint import request as parts
from actors.endpoint.chat_form import ROLES, forced_tool, listed
from actors.endpoint.request import ChatMessage, ChatRequest, RequestRefused, require
from actors.endpoint.session import Completion
from actors.endpoint.structure import structure_of

_NEUTRAL: dict[str, tuple[Any, ...]] = {  # keys of which only these values are supported
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),  # of texts that OpenAI's servers hold
    "truncation": (None, "disabled"),
    "top_logprobs": (None, 0),  # the engine knows those of the sampled tokens alone
}
_USED = (
    *("input", "instructions", "previous_response_id", "tools", "tool_choice", "text", "model"),
    *("parallel_tool_calls", "max_output_tokens", "include", "stream"),
)
_IGNORED = (
    *("temperature", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "reasoning", "max_tool_calls"),
    *("stream_options", "context_management"),
)
_LOGPROBS = "message.output_text.logprobs"
# the messages of the conversation with this name of its last answer, None if there is none
Earlier = Callable[[str], tuple[ChatMessage, ...] | None]


def decode(body: bytes, earlier: Earlier) -> ChatRequest:
    """Decode the body of a request. Raise RequestRefused, which names the key."""
    value = parts.body_of(body)
    ignored = parts.check_keys(value, _USED, _IGNORED, _NEUTRAL)
    form = value.get("text")
    form = form if isinstance(form, dict) else {}
    structure = structure_of("text.format", form.get("format"))
    messages, raw = _messages(value)
    instructions = parts.text_of(value.get("instructions"))
    instructed = [ChatMessage("system", instructions)] if instructions else []
    messages = [*instructed, *_continued(value, earlier), *messages]
    conversation, prefill = parts.prefilled(messages, raw)
    tools, tools_text, strict = parts.tools_of([*map(_function, parts.list_of(value, "tools"))])
    calling, forced, single = parts.choice_of(
        tools, *forced_tool(value), value.get("parallel_tool_calls")
    )
    return ChatRequest(
        messages=conversation,
        model=parts.model_of(value),
        tools=tools,
        tools_text=tools_text,
        strict=strict,
        structure=structure,
        calling=calling,
        forced=forced,
        single=single,
        prefill=prefill,
        max_tokens=parts.whole_number(value, "max_output_tokens"),
        logprobs=_LOGPROBS in parts.list_of(value, "include"),
        stream=value.get("stream") is True,
        instructed=len(instructed),
        ignored=(*ignored, *(["text.verbosity"] if form.get("verbosity") else [])),
    )


def whole(request: ChatRequest, answers: list[Completion], now_s: int) -> bytes:
    """Encode an answer that is not streamed."""
    return json.dumps(_response(request, answers[0], now_s)).encode()


def events(request: ChatRequest, answers: list[Completion], now_s: int) -> bytes:
    """Encode a stream: every item with its text or arguments in one piece."""
    response = _response(request, answers[0], now_s)
    encoded = []
    for number, (kind, value) in enumerate(_events(response)):
        data = json.dumps({"type": kind, "sequence_number": number, **value})
        encoded.append(f"event: {kind}\ndata: {data}\n\n")
    return "".join(encoded).encode()


def _continued(value: dict[str, Any], earlier: Earlier) -> tuple[ChatMessage, ...]:
    previous = value.get("previous_response_id")
    if previous is None:
        return ()
    found = earlier(previous.removeprefix("resp_")) if isinstance(previous, str) else None
    if found is None:
        text = f"previous_response_id: {previous!r} is no answer of this episode"
        raise RequestRefused(text[:500], "previous_response_not_found")
    return found


def _messages(value: dict[str, Any]) -> tuple[list[ChatMessage], str]:
    """Return the messages of the input, and the text of the last one as it is.

    Calls belong to the message of the assistant that they follow.
    """
    given = value.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    found: list[ChatMessage] = []
    raw = ""
    for item in parts.list_of({"input": given}, "input"):
        require(isinstance(item, dict), "input: each item must be an object")
        kind, raw = item.get("type", "message"), ""
        if kind == "function_call":
            call = parts.call_of(item.get("name"), item.get("arguments"))
            if not found or found[-1].role != "assistant":
                found.append(ChatMessage("assistant", ""))
            found[-1] = found[-1]._replace(calls=(*found[-1].calls, call))
        elif kind == "function_call_output":
            found.append(ChatMessage("tool", parts.text_of(item.get("output"))))
        elif kind == "message":
            role, raw = item.get("role"), parts.text_of(item.get("content"))
            known = isinstance(role, str) and role in (*ROLES, "assistant")
            require(known, f"input: the role {role!r} is not supported")
            if role == "assistant":
                found.append(ChatMessage(role, raw.strip()))
            else:
                found.append(ChatMessage(ROLES[role], raw))
        else:
            raise RequestRefused(f"input: items of type {kind!r} are not supported"[:500])
    return found, raw


def _function(tool: Any) -> tuple[Any, Any, Any, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        problem = f"tools: of type {kind!r}: the agent's own functions alone are supported"
        raise RequestRefused(problem[:500])
    strict = tool.get("strict") is True
    return tool.get("name"), tool.get("description"), tool.get("parameters"), strict


def _response(request: ChatRequest, answer: Completion, now_s: int) -> dict[str, Any]:
    cut = answer.finish == "length"
    return {
        "id": f"resp_{answer.name}",
        "object": "response",
        "created_at": now_s,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": request.messages[0].content if request.instructed else None,
        "metadata": {},
        "model": request.model,
        "output": _items(request, answer),
        "parallel_tool_calls": not request.single,
        "temperature": answer.temperature,
        "text": {"format": request.structure.form if request.structure else {"type": "text"}},
        "tool_choice": _tool_choice(request),
        "tools": [
            {"type": "function", "description": None, "parameters": None}
            | {"strict": tool["function"]["name"] in request.strict}
            | tool["function"]
            for tool in request.tools
        ],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def _tool_choice(request: ChatRequest) -> Any:
    if request.forced is None:
        return "auto" if request.calling or not request.tools else "none"
    return {"type": "function", "name": request.forced} if request.forced else "required"


def _items(request: ChatRequest, answer: Completion) -> list[dict[str, Any]]:
    status = "incomplete" if answer.finish == "length" else "completed"
    content, calls = answer.turn.content, answer.turn.calls
    items = []
    if content or not calls:
        text = {"type": "output_text", "text": content, "annotations": []}
        text["logprobs"] = listed(answer) if request.logprobs else []
        item = {"type": "message", "id": f"msg_{answer.name}", "role": "assistant"}
        items.append(item | {"status": status, "content": [text]})
    for index, (name, arguments) in enumerate(calls):
        call_id = answer.call_id(index)
        item = {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id}
        items.append(item | {"name": name, "arguments": arguments, "status": status})
    return items


def _events(response: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kinds and the values of a stream's events."""
    started = response | {"status": "in_progress", "output": [], "usage": None}
    started["incomplete_details"] = None
    for kind in ("created", "in_progress"):
        yield f"response.{kind}", {"response": started}
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        called = item["type"] == "function_call"
        empty = {"arguments": ""} if called else {"content": []}
        added = item | empty | {"status": "in_progress"}
        yield "response.output_item.added", {"output_index": index, "item": added}
        if called:
            kind, arguments = "response.function_call_arguments", item["arguments"]
            yield f"{kind}.delta", place | {"delta": arguments}
            yield f"{kind}.done", place | {"arguments": arguments, "name": item["name"]}
        else:
            place |= {"content_index": 0}
            (part,) = item["content"]
            begun = part | {"text": "", "logprobs": []}
            text, logprobs = part["text"], {"logprobs": part["logprobs"]}
            yield "response.content_part.added", place | {"part": begun}
            yield "response.output_text.delta", place | {"delta": text} | logprobs
            yield "response.output_text.done", place | {"text": text} | logprobs
            yield "response.content_part.done", place | {"part": part}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}
