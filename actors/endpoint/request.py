"""Requests of all API forms, decoded strictly into one kind; and the parts that the forms share.

An unsupported option is refused, unknown ones included, never ignored: it could change the sampled
distribution, of which training needs the log-probs. Ignored are `temperature` and `seed`, because
clients send them by default and those of the run apply, and options that change no sampling.
"""

import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from actors.endpoint.tools import ChatToolCall, canonical
from actors.formats.chat import encodable

POLICY = "policy"  # name of the model where no player has one
MAX_STOPS, MAX_CHOICES = 4, 128  # of choices OpenAI's limit
SAMPLED: dict[str, tuple[Any, ...]] = {  # keys that change the sampling, with their neutral values
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
}
_WHOLE = "the policy samples from its whole distribution, of which training needs the log-probs"
_MEDIA = ("image", "audio", "video", "file", "document")


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


class Structure(NamedTuple):
    """Form that a request prescribes for its answer. `key`: the option that does; `form`: its
    value; `schema`: the JSON schema that follows from it."""

    key: str
    form: dict[str, Any]
    schema: dict[str, Any]


class ChatRequest(NamedTuple):
    """A decoded request.

    `tools`: function specs, `tools_text` their canonical text, `strict`: the names of those whose
    arguments must obey their schema. `structure`: the form of an answer that is no call. `forced`:
    name of the tool that must be called, "" for any; None if the model may write text. `single`: at
    most one call. `prefill`: the beginning of the answer, which the client wrote. `instructed`: how
    many of the first messages are of this request alone, not of the conversation.
    """

    messages: tuple[ChatMessage, ...]
    model: str
    tools: list[dict[str, Any]]
    tools_text: str
    calling: bool = False  # True if the model may call tools
    forced: str | None = None
    single: bool = False
    prefill: str = ""
    max_tokens: int = 0  # 0: no limit
    stop: tuple[str, ...] = ()
    choices: int = 1  # answers to sample
    logprobs: bool = False
    stream: bool = False
    usage: bool = False  # True if a stream ends with token counts
    instructed: int = 0
    strict: frozenset[str] = frozenset()
    structure: Structure | None = None
    switches: Mapping[str, Any] = MappingProxyType({})  # variables of the chat template
    ignored: tuple[str, ...] = ()  # keys without an effect

    @property
    def once(self) -> bool:
        """True if a call ends the answer."""
        return self.calling and self.single


class ToolChoice(NamedTuple):
    """The fields `calling`, `forced` and `single` of a request."""

    calling: bool
    forced: str | None
    single: bool


def body_of(body: bytes) -> dict[str, Any]:
    """Read a body as a JSON object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}") from None
    require(isinstance(value, dict), "the body must be an object")
    return value


def require(holds: bool, problem: str) -> None:
    if not holds:
        raise RequestRefused(problem[:500])


def check_keys(
    value: Mapping[str, Any],
    used: Collection[str],
    ignored: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
) -> tuple[str, ...]:
    """Refuse keys that are unknown or not `neutral`; return those that have no effect."""
    for name, allowed in {**neutral, **SAMPLED}.items():
        reason = f": {_WHOLE}" if name in SAMPLED else ""
        problem = f"{name}: {value.get(name)!r} is not supported{reason}"
        require(value.get(name) in allowed, problem)
    known = {*used, *ignored, *neutral, *SAMPLED}
    for name, given in value.items():
        require(given is None or name in known, f"{name}: this option is not supported")
    return tuple(name for name in ignored if value.get(name) is not None)


def list_of(value: Mapping[str, Any], name: str) -> list[Any]:
    found = value.get(name)
    found = [] if found is None else found
    require(isinstance(found, list), f"{name}: must be a list")
    return found


def text_of(content: Any) -> str:
    """Return the text of a message; a question mark replaces what UTF-8 cannot encode."""
    if content is None:
        return ""
    if isinstance(content, list):
        content = "".join(map(_text_of_part, content))
    require(isinstance(content, str), "messages: content must be text")
    return encodable(content)


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and any(name in kind for name in _MEDIA):
        raise RequestRefused(f"messages: content of type {kind}: the policy reads text alone")
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise RequestRefused("messages: content must be text")
    return text


def call_of(name: Any, arguments: Any) -> ChatToolCall:
    """Return a call of earlier messages; `arguments` is an object or its JSON."""
    if not isinstance(name, str):
        raise RequestRefused("messages: a tool call has no name")
    try:
        found = json.loads(arguments or "{}") if not isinstance(arguments, dict) else arguments
        require(isinstance(found, dict), "messages: arguments of a tool call must be an object")
        return ChatToolCall(encodable(name), canonical(found))
    except (TypeError, ValueError, RecursionError):
        raise RequestRefused("messages: arguments of a tool call must be JSON") from None


def prefilled(messages: list[ChatMessage], raw: str) -> tuple[tuple[ChatMessage, ...], str]:
    """Separate the beginning of an answer, which is the last message, from those before it.

    `raw` is its text with the blanks that messages lose.
    """
    require(bool(messages), "messages: the list is empty")
    if messages[-1].role != "assistant":
        return tuple(messages), ""
    require(not messages[-1].calls, "messages: the last one must not be a tool call")
    require(len(messages) > 1, "messages: the assistant's alone")
    return tuple(messages[:-1]), raw


def tools_of(
    specs: list[tuple[Any, Any, Any, Any]],
) -> tuple[list[dict[str, Any]], str, frozenset[str]]:
    """Make function specs from names, descriptions, parameters and whether they are strict.

    Return also their canonical text, and the names of the strict ones. The model is not told which
    these are: none was trained to read it.
    """
    tools = []
    for name, description, parameters, _ in specs:
        require(isinstance(name, str) and bool(name), "tools: each must be a named function")
        parts = {"name": name, "description": description, "parameters": parameters}
        kept = {key: part for key, part in parts.items() if part is not None}
        tools.append({"type": "function", "function": kept})
    try:
        return tools, canonical(tools), frozenset(name for name, *_, strict in specs if strict)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"tools: {error}") from None


def choice_of(tools: list[dict[str, Any]], forced: str | None, none: bool, many: Any) -> ToolChoice:
    """Check a choice of tools. `none`: no tool may be called; `many`: False for one call at most.

    A tool that is forced by its name is called once.
    """
    require(many in (None, True, False), f"parallel_tool_calls: {many!r} is not supported")
    if forced is not None:
        names = [tool["function"]["name"] for tool in tools]
        require(bool(names), "tool_choice: there are no tools")
        require(not forced or forced in names, f"tool_choice: {forced!r} is none of the tools")
    return ToolChoice(bool(tools) and not none, forced, many is False or bool(forced))


def whole_number(value: Mapping[str, Any], *names: str, most: int = 1 << 31) -> int:
    """Return the first of these numbers that is given, at least 1 and at most `most`; else 0."""
    for name in names:
        number = value.get(name)
        if number is not None:
            fits = type(number) is int and 0 < number <= most
            require(fits, f"{name}: must be a whole number above 0, at most {most}")
            return number
    return 0


def stop_of(value: Any, name: str = "stop") -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    fits = isinstance(stops, list) and len(stops) <= MAX_STOPS
    require(
        fits and all(isinstance(one, str) and one and one == encodable(one) for one in stops),
        f"{name}: must be at most {MAX_STOPS} non-empty texts that UTF-8 can encode",
    )
    return tuple(stops)


def model_of(value: Mapping[str, Any]) -> str:
    return value["model"] if isinstance(value.get("model"), str) else POLICY
