"""Strict decoding of chat completion requests, as OpenAI's clients send them.

An unsupported option is refused, unknown ones included, never ignored: it could change the sampled
distribution, of which training needs the log-probs. Ignored are `temperature` and `seed`, because
clients send them by default and those of the run apply, and options that change no answer.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from actors.endpoint.tools import ChatToolCall, canonical
from actors.formats.chat import encodable

_ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # keys of which only these values are supported
    "n": (None, 1),
    "tool_choice": (None, "auto", "none"),
    "parallel_tool_calls": (None, True),
    "response_format": (None, {"type": "text"}),
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
}
_USED = {"messages", "tools", "max_tokens", "max_completion_tokens", "stop", "model"}
_USED |= {"stream", "stream_options", "chat_template_kwargs"}
_IGNORED = {"temperature", "seed", "user", "metadata", "store", "service_tier"}
_IGNORED |= {"safety_identifier", "prompt_cache_key"}
_KNOWN = _USED | _IGNORED | _NEUTRAL.keys()
MAX_STOPS = 4


class RequestRefused(Exception):
    """A request that is answered with an error. `code` is machine-readable."""

    def __init__(self, text: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(text)
        self.code = code
        self.status = status


class ChatMessage(NamedTuple):
    """One message of a conversation, normalised: equal in meaning is equal in value."""

    role: str
    content: str
    calls: tuple[ChatToolCall, ...] = ()


class ChatRequest(NamedTuple):
    """A decoded request.

    `tools`: function specs, `tools_text` their canonical text; `max_tokens`: 0 is no limit.
    """

    messages: tuple[ChatMessage, ...]
    tools: list[dict[str, Any]]
    tools_text: str
    calling: bool  # True if the model may call tools
    max_tokens: int
    stop: tuple[str, ...]
    stream: bool
    usage: bool  # True if a stream ends with token counts
    model: str
    switches: Mapping[str, Any] = MappingProxyType({})  # variables of the chat template


def decode(body: bytes) -> ChatRequest:
    """Decode the body of a request. Raise RequestRefused, which names the key."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}") from None
    _require(isinstance(value, dict), "the body must be an object")
    for name, allowed in _NEUTRAL.items():
        _require(value.get(name) in allowed, f"{name}: {value.get(name)!r} is not supported")
    for name, given in value.items():
        _require(given is None or name in _KNOWN, f"{name}: this option is not supported")
    messages = tuple(map(_message, _list(value, "messages")))
    _require(bool(messages), "messages: the list is empty")
    _require(messages[-1].role != "assistant", "messages: the last one must not be the assistant's")
    tools, tools_text = _tools(value)
    options = value.get("stream_options")
    return ChatRequest(
        messages=messages,
        tools=tools,
        tools_text=tools_text,
        calling=bool(tools) and value.get("tool_choice") != "none",
        max_tokens=_max_tokens(value),
        stop=_stop(value.get("stop")),
        stream=value.get("stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        model=value["model"] if isinstance(value.get("model"), str) else "policy",
        switches=_switches(value.get("chat_template_kwargs")),
    )


def _switches(value: Any) -> dict[str, Any]:
    """Return variables of the chat template, such as `enable_thinking`."""
    value = {} if value is None else value
    _require(isinstance(value, dict), "chat_template_kwargs: must be an object")
    return value


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise RequestRefused(problem[:500])


def _list(value: dict[str, Any], name: str) -> list[Any]:
    found = value.get(name)
    found = [] if found is None else found
    _require(isinstance(found, list), f"{name}: must be a list")
    return found


def _message(value: Any) -> ChatMessage:
    _require(isinstance(value, dict), "messages: each must be an object")
    role, content = value.get("role"), _text(value.get("content"))
    if role == "assistant":
        return ChatMessage(role, content.strip(), tuple(map(_call, _list(value, "tool_calls"))))
    _require(
        isinstance(role, str) and role in _ROLES, f"messages: the role {role!r} is not supported"
    )
    return ChatMessage(_ROLES[role], content)


def _text(content: Any) -> str:
    """Return the text of a message; a question mark replaces what UTF-8 cannot encode."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        _require(len(texts) == len(parts), "messages: content must be text")
        content = "".join(texts)
    _require(isinstance(content, str), "messages: content must be text")
    return encodable(content)


def _call(value: Any) -> ChatToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise RequestRefused("messages: tool_calls must have a function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise RequestRefused("messages: a tool call has no name")
    try:
        found = json.loads(arguments or "{}")
        _require(isinstance(found, dict), "messages: arguments of a tool call must be an object")
        return ChatToolCall(name, canonical(found))
    except (TypeError, ValueError, RecursionError):
        raise RequestRefused("messages: arguments of a tool call must be JSON") from None


def _tools(value: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Return the specs of the tools and their canonical text."""
    tools = _list(value, "tools")
    for tool in tools:
        _function(tool)
    try:
        return tools, canonical(tools)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"tools: {error}") from None


def _function(tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    _require(named and tool.get("type") == "function", "tools: each must be a named function")


def _max_tokens(value: dict[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        most = value.get(name)
        if most is not None:
            _require(type(most) is int and most > 0, f"{name}: must be a whole number above 0")
            return most
    return 0


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    fits = isinstance(stops, list) and len(stops) <= MAX_STOPS
    _require(
        fits and all(isinstance(one, str) and one and one == encodable(one) for one in stops),
        f"stop: must be at most {MAX_STOPS} non-empty texts that UTF-8 can encode",
    )
    return tuple(stops)
